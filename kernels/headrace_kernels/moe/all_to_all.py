"""A `Dispatch` on any transport that carries a parcel from each rank of a group to each other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch

from headrace_kernels.moe.dispatch import (
    Combine,
    Received,
    Returned,
    Routed,
    SendPlan,
    in_order_of_sends,
    plan_sends,
)
from headrace_kernels.moe.placement import LayerPlacement, Replicas

Parcel: TypeAlias = tuple[torch.Tensor, ...]  # as many and of the same dtypes from every rank


class Transport(Protocol):
    """Carries parcels between the ranks of a group, which all call it in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def post(self, parcels: Sequence[Parcel]) -> Callable[[], list[Parcel]]:
        """Send the parcel for each rank on its way. The result waits for the parcels that come, in the order of ranks.

        Raises what names the rank that did not send in time.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll:
    """The `Dispatch` of one layer. `home` says which replica of each expert this rank uses."""

    transport: Transport
    home: Replicas
    combine: Combine

    @classmethod
    def of(
        cls,
        placement: LayerPlacement,
        transport: Transport,
        combine: Combine,
        device: torch.device,
    ) -> AllToAll:
        assert len(placement.ranks) == transport.ranks, "a placement is of one group"
        home = placement.replicas_for(transport.rank, device)
        return cls(transport=transport, home=home, combine=combine)

    def send(self, routed: Routed) -> AllToAllSent:
        x, ids, weights = routed
        plan = plan_sends(ids, weights, self.home, self.transport.ranks, self.combine)
        sizes = plan.counts.tolist()
        columns = (x[plan.rows], plan.slots, plan.weights)
        parts = zip(*(column.split(sizes) for column in columns), strict=True)
        return AllToAllSent(self.transport, plan, self.transport.post(list(parts)))


@dataclass(slots=True)
class AllToAllSent:
    """Rows on their way."""

    transport: Transport
    plan: SendPlan
    wait: Callable[[], list[Parcel]]
    ends: list[int] = field(default_factory=list)  # of the rows of each rank among those received

    def receive(self) -> Received:
        parcels = self.wait()
        self.ends = torch.tensor([len(parcel[0]) for parcel in parcels]).cumsum(0).tolist()
        x, slots, weights = (torch.cat(column) for column in zip(*parcels, strict=True))
        return Received(x, slots, weights)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        parts = [
            (in_order_of_sends(y, places[start:end]),) for start, end in pairwise([0, *self.ends])
        ]
        back = [parcel[0] for parcel in self.transport.post(parts)()]
        assert [len(part) for part in back] == self.plan.answers.tolist(), (
            "one for each that is due"
        )
        return Returned(torch.cat(back), self.plan.places)

"""A `Dispatch` on any transport that carries a parcel from each rank of a group to each other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from headrace import _core
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
from headrace_kernels.moe.transport import Arrived, NativeTransport, Span, Transport


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
        columns = (x.index_select(0, plan.rows), plan.slots, plan.weights)
        return AllToAllSent(self.transport, plan, self.transport.post(columns, spans(plan.counts)))

    def native(self) -> _core.SharedExchange | None:
        """Of a `NativeTransport`: parcels of the same bytes, so other ranks may use either."""
        if not isinstance(self.transport, NativeTransport):
            return None
        return self.transport.layer_exchange(self.home, self.combine)


@dataclass(slots=True)
class AllToAllSent:
    """Rows on their way."""

    transport: Transport
    plan: SendPlan
    wait: Callable[[], Arrived]
    counts: list[int] = field(default_factory=list)  # received rows, of each rank

    def receive(self) -> Received:
        (x, slots, weights), self.counts = self.wait()
        return Received(x, slots, weights)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        results, answers = in_order_of_sends(y, places, self.counts)
        (back,), counts = self.transport.post((results,), spans(answers))()
        assert counts == self.plan.answers, "one for each that is due"
        return Returned(back, self.plan.places)


def spans(counts: Sequence[int]) -> list[Span]:
    """Parcels that lie one after the other."""
    return [Span(*ends) for ends in pairwise(accumulate(counts, initial=0))]

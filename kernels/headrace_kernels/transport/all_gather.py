"""All rows to all ranks: a `Dispatch` for groups of few ranks, where most rows go to most of them anyway.

A rank sends its rows as they are, to each rank at once, and each picks what its slots are asked for. With `k` experts
a row, a row goes to all `R` ranks rather than to `n <= min(k, R)` of them. Results come back as in `AllToAll`, so the
bits are the same in both ways to sum: one by one, or one sum of each rank, added at home in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace_kernels.moe.all_to_all import spans
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
from headrace_kernels.moe.transport import Arrived, Span, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """The `Dispatch` of one layer."""

    transport: Transport
    combine: Combine
    home: Replicas  # that this rank uses
    slots: (
        torch.Tensor
    )  # [ranks, experts], int32; here, for rows of each rank, -1 where those go elsewhere

    @classmethod
    def of(
        cls,
        placement: LayerPlacement,
        transport: Transport,
        combine: Combine,
        device: torch.device,
    ) -> AllGather:
        assert len(placement.ranks) == transport.ranks, "a placement is of one group"
        homes = [placement.replicas_for(rank, device) for rank in range(transport.ranks)]
        slots = [torch.where(home.rank == transport.rank, home.slot, -1) for home in homes]
        return cls(
            transport=transport,
            combine=combine,
            home=homes[transport.rank],
            slots=torch.stack(slots),
        )

    def send(self, routed: Routed) -> AllGatherSent:
        everything = [Span(0, len(routed.x))] * self.transport.ranks
        wait = self.transport.post(tuple(routed), everything)
        # What comes back is in this order; found while rows are on their way.
        plan = plan_sends(routed.ids, routed.weights, self.home, self.transport.ranks, self.combine)
        return AllGatherSent(self, plan, wait)


@dataclass(slots=True)
class AllGatherSent:
    """Rows on their way."""

    dispatch: AllGather
    plan: SendPlan
    wait: Callable[[], Arrived]
    counts: list[int] | None = None  # received rows, of each rank
    asked: torch.Tensor | None = None  # [n], bool; rows that ask slots here

    def receive(self) -> Received:
        (x, ids, weights), self.counts = self.wait()
        sender = torch.repeat_interleave(torch.tensor(self.counts, device=ids.device))
        slots = self.dispatch.slots[sender[:, None], ids.long()]
        self.asked = (slots >= 0).any(1)
        return Received(x, slots, weights)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        assert self.counts is not None and self.asked is not None, "receive comes first"
        places = torch.where(self.asked[:, None], places, -1)  # no sums of nothing
        results, answers = in_order_of_sends(y, places, self.counts)
        (back,), counts = self.dispatch.transport.post((results,), spans(answers))()
        assert counts == self.plan.answers, "one for each that is due"
        return Returned(back, self.plan.places)

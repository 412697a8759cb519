"""One rank of an expert-parallel group without the others: they send it what it would send them.

A group of R ranks has T rows on each, and every row goes to `top_k` experts. Where all ranks are alike, a rank's
experts get as many pairs of row and expert as the rank sends away: T * top_k. So each pair of this rank's own rows
comes back as the pair of another rank's row, to the local expert whose place on its rank is the same. What would move
between ranks does not move; how long that would take is a model of its own (bench/gpu/communication.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_kernels.moe.dispatch import Combine, Received, Returned, Routed


@dataclass(frozen=True, slots=True)
class OneRankOf:
    """A `Dispatch` for a rank with `local_experts`."""

    local_experts: int
    top_k: int
    combine: Combine = "exact"

    def send(self, routed: Routed) -> SentToItself:
        assert routed.ids.shape[1] == self.top_k
        return SentToItself(self, routed)


@dataclass(frozen=True, slots=True)
class SentToItself:
    group: OneRankOf
    routed: Routed

    def receive(self) -> Received:
        x, ids, weights = self.routed
        # A copy each, as they would come from others.
        rows = x.repeat_interleave(self.group.top_k, dim=0)
        slots = (ids % self.group.local_experts).view(-1, 1)
        return Received(rows, slots, weights.view(-1, 1))

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        return Returned(y, places.view(-1, self.group.top_k))

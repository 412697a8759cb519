"""Which slots of which ranks hold the experts of one layer, and which of them the rows of a rank go to.

An expert may be in slots of several ranks (a replica), never in two of one rank. All rows of a rank use the same
replica of an expert: its own, or the one that its number falls to. So what a row is sent to depends on neither its
place in a batch nor the rows beside it, and ranks together spread over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Replicas(NamedTuple):
    """Where one rank sends rows of each expert, `[experts]` each."""

    rank: torch.Tensor  # int64
    slot: torch.Tensor  # int32, of that rank


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The expert in each slot, rank by rank.

    Raises ValueError where an expert has no slot, or two of one rank, and where a rank has none.
    """

    experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, held in enumerate(self.ranks):
            if not held:
                raise ValueError(f"rank {rank} holds no expert")
            for expert in held:
                if not 0 <= expert < self.experts:
                    raise ValueError(f"rank {rank}: expert {expert} of {self.experts}")
            if len(set(held)) < len(held):
                raise ValueError(f"rank {rank}: an expert is in two of its slots: {list(held)}")
        missing = set(range(self.experts)).difference(*self.ranks)
        if missing:
            raise ValueError(f"no rank holds expert {min(missing)}, and {len(missing) - 1} more")

    @classmethod
    def even(cls, experts: int, ranks: int) -> LayerPlacement:
        """Every expert once, in order, as evenly as can be."""
        bounds = [experts * rank // ranks for rank in range(ranks + 1)]
        held = [tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(ranks)]
        return cls(experts, tuple(held))

    def replicas_for(self, rank: int, device: torch.device) -> Replicas:
        """Where `rank` sends its rows: to itself where it can."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]
        for holder, held in enumerate(self.ranks):
            for slot, expert in enumerate(held):
                places[expert].append((holder, slot))
        chosen = [_replica(of_expert, rank) for of_expert in places]
        return Replicas(
            rank=torch.tensor([holder for holder, _ in chosen], device=device),
            slot=torch.tensor([slot for _, slot in chosen], dtype=torch.int32, device=device),
        )


def _replica(places: Sequence[tuple[int, int]], rank: int) -> tuple[int, int]:
    own = [place for place in places if place[0] == rank]
    return own[0] if own else places[rank % len(places)]

"""How one placement of a layer becomes another: waves of moves, each of which leaves every expert somewhere.

A *move* puts an expert into a slot in place of another one. A *wave* changes at most one slot of each rank, all of them
at once, and what stands after it is a placement again. So a rank never needs room for more than one expert beside its
slots. There always is such a wave: where the last holder of an expert loses it, the expert comes to another rank in the
same wave, which loses one in turn; that chain ends at an expert that is elsewhere too, or closes to a circle.

Only slots whose expert is not to stay change. Of several holders the one sends that sends least so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from headrace_kernels.moe.placement import LayerPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMove:
    """A slot gets the expert that another rank holds in some slot before the wave."""

    rank: int
    slot: int
    expert: int
    source: int
    source_slot: int


Wave: TypeAlias = tuple[ExpertMove, ...]  # by rank


class _Change(NamedTuple):
    rank: int
    leaves: int
    comes: int


def plan_waves(current: LayerPlacement, target: Sequence[Collection[int]]) -> list[Wave]:
    """Waves from `current` to a placement where each rank holds the experts of `target`.

    Raises ValueError where that is no placement, or a rank has another number of slots there.
    """
    LayerPlacement(current.experts, tuple(map(tuple, target)))
    sizes = [len(held) for held in current.ranks]
    if [len(held) for held in target] != sizes:
        raise ValueError(f"ranks have {sizes} slots, not {[len(held) for held in target]}")
    planner = _Planner(current, target)
    waves: list[Wave] = []
    while wave := planner.wave():
        waves.append(wave)
    return waves


def after_wave(placement: LayerPlacement, wave: Wave) -> LayerPlacement:
    """The placement once all moves of the wave are done."""
    ranks = [list(held) for held in placement.ranks]
    for move in wave:
        ranks[move.rank][move.slot] = move.expert
    return LayerPlacement(placement.experts, tuple(map(tuple, ranks)))


def busiest(waves: Sequence[Wave]) -> int:
    """Experts that go through the busiest rank, in or out, wave after wave."""
    return sum(_busiest_of(wave) for wave in waves)


def _busiest_of(wave: Wave) -> int:
    sent = Counter(move.source for move in wave)
    return max([1, *sent.values()])  # nobody gets two in a wave


class _Planner:
    """What is still to change."""

    def __init__(self, current: LayerPlacement, target: Sequence[Collection[int]]) -> None:
        self._held = [list(held) for held in current.ranks]
        self._leaving = [
            [expert for expert in held if expert not in set(goal)]
            for held, goal in zip(self._held, target, strict=True)
        ]
        self._coming = [
            sorted(set(goal).difference(held))
            for held, goal in zip(self._held, target, strict=True)
        ]
        self._sent = Counter[int]()

    def wave(self) -> Wave:
        """The next one; empty where nothing is left to do. Ranks with the most changes go first."""
        changes: dict[int, _Change] = {}
        order = sorted(range(len(self._held)), key=lambda rank: -len(self._coming[rank]))
        for rank in order:
            if self._coming[rank] and rank not in changes:
                changes |= {change.rank: change for change in self._chain(rank, changes)}
        moves = self._moves([changes[rank] for rank in sorted(changes)])
        for move in moves:
            leaves = self._held[move.rank][move.slot]
            self._held[move.rank][move.slot] = move.expert
            self._leaving[move.rank].remove(leaves)
            self._coming[move.rank].remove(move.expert)
        return moves

    def _chain(self, first: int, taken: dict[int, _Change]) -> list[_Change]:
        """Changes of this rank and those that have to go with it; none where those ranks are taken."""
        chain: list[_Change] = []
        rank, comes = first, self._coming[first][0]
        while True:
            at = {change.rank: i for i, change in enumerate(chain)}
            leaves = next(
                (e for e in self._leaving[rank] if self._stays(e, rank, [*taken.values(), *chain])),
                None,
            )
            if leaves is not None:
                return [*chain, _Change(rank, leaves, comes)]
            leaves = self._leaving[rank][0]
            chain.append(_Change(rank, leaves, comes))
            at[rank] = len(chain) - 1
            takers = [r for r, coming in enumerate(self._coming) if leaves in coming]
            if closing := [r for r in takers if r in at]:
                start = at[closing[0]]
                circle = chain[start:]
                return [circle[0]._replace(comes=leaves), *circle[1:]]
            free = [r for r in takers if r not in taken]
            if not free:
                return []
            rank, comes = free[0], leaves

    def _stays(self, expert: int, rank: int, changes: Sequence[_Change]) -> bool:
        """Whether the expert is somewhere after the wave, if it leaves this rank too."""
        leave = {change.rank for change in changes if change.leaves == expert} | {rank}
        if any(change.comes == expert for change in changes):
            return True
        return any(holder not in leave for holder in self._holders(expert))

    def _holders(self, expert: int) -> Iterator[int]:
        return (rank for rank, held in enumerate(self._held) if expert in held)

    def _moves(self, changes: Sequence[_Change]) -> Wave:
        """Each change with the rank that sends. Experts that few hold choose first."""
        now = Counter[int]()
        sources: dict[int, int] = {}
        for change in sorted(changes, key=lambda change: len(list(self._holders(change.comes)))):
            holders = self._holders(change.comes)
            source = min(holders, key=lambda rank: (now[rank], self._sent[rank], rank))
            now[source] += 1
            sources[change.rank] = source
        self._sent += now
        return tuple(
            ExpertMove(
                rank=change.rank,
                slot=self._held[change.rank].index(change.leaves),
                expert=change.comes,
                source=sources[change.rank],
                source_slot=self._held[sources[change.rank]].index(change.comes),
            )
            for change in changes
        )

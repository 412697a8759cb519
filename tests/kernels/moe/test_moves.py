"""Waves of moves: every expert stays somewhere, no slot changes without need, and the target is reached."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kernels.moe.moves import after_wave, busiest, plan_waves
from headrace_kernels.moe.placement import LayerPlacement


@st.composite
def pairs_of_placements(draw: st.DrawFn) -> tuple[LayerPlacement, LayerPlacement]:
    """Two placements of the same experts in as many slots."""
    ranks = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks))
    experts = draw(st.integers(max(sizes), sum(sizes)))

    def placement() -> LayerPlacement:
        order = draw(st.permutations(range(experts)))
        held: list[list[int]] = [[] for _ in sizes]
        for expert in order:  # each once, where there is room
            open_ = [rank for rank, size in enumerate(sizes) if len(held[rank]) < size]
            held[draw(st.sampled_from(open_))].append(expert)
        for rank, size in enumerate(sizes):
            spare = draw(st.permutations(sorted(set(range(experts)) - set(held[rank]))))
            held[rank] += spare[: size - len(held[rank])]
        return LayerPlacement(experts, tuple(map(tuple, held)))

    return placement(), placement()


@given(pairs_of_placements())
def test_waves_lead_from_one_placement_to_another(
    pair: tuple[LayerPlacement, LayerPlacement],
) -> None:
    placement, target = pair
    waves = plan_waves(placement, target.ranks)
    stays = [set(a) & set(b) for a, b in zip(placement.ranks, target.ranks, strict=True)]
    kept = [
        [held.index(e) for e in both] for held, both in zip(placement.ranks, stays, strict=True)
    ]
    needed = sum(len(set(b) - set(a)) for a, b in zip(placement.ranks, target.ranks, strict=True))
    assert sum(map(len, waves)) == needed
    for wave in waves:
        assert wave
        assert max(Counter(move.rank for move in wave).values()) == 1
        for move in wave:
            assert placement.ranks[move.source][move.source_slot] == move.expert
            assert move.source != move.rank and move.slot not in kept[move.rank]
        placement = after_wave(placement, wave)  # which refuses what is no placement
    assert [set(held) for held in placement.ranks] == [set(held) for held in target.ranks]
    assert plan_waves(placement, target.ranks) == []


def test_the_same_plan_is_made_everywhere() -> None:
    current = LayerPlacement(6, ((0, 1, 2), (3, 4, 5), (0, 3, 1)))
    target = [[5, 1, 4], [2, 0, 3], [0, 3, 1]]
    assert plan_waves(current, target) == plan_waves(current, [held[::-1] for held in target])


def test_a_swap_of_the_only_copies_is_one_wave() -> None:
    waves = plan_waves(LayerPlacement(2, ((0,), (1,))), [[1], [0]])
    assert [[(move.rank, move.expert, move.source) for move in wave] for wave in waves] == [
        [(0, 1, 1), (1, 0, 0)]
    ]
    assert busiest(waves) == 1


def test_copies_share_the_sending() -> None:
    # Expert 0 is on four ranks and comes to four others: each holder sends it once.
    current = LayerPlacement(3, ((0,), (0,), (0,), (0,), (1,), (1,), (2,), (2,), (1,), (2,)))
    target = [[0]] * 8 + [[1], [2]]
    (wave,) = plan_waves(current, target)
    assert sorted(move.source for move in wave) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ([[0, 1], [0]], r"ranks have \[1, 1\] slots, not \[2, 1\]"),
        ([[0], [0]], "no rank holds expert 1"),
        ([[0]], "no rank holds expert 1"),
        ([[0], [2]], "expert 2 of 2"),
    ],
)
def test_a_target_that_is_none_is_refused(target: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_waves(LayerPlacement(2, ((0,), (1,))), target)

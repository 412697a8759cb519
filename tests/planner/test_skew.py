"""How uneven experts' loads leave the ranks, against drawing the rows one by one."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.model.assumptions import BALANCED_EXCESS, UNBALANCED_EXCESS
from headrace.planner.model.skew import (
    balanced,
    busiest_rows,
    drawn_loads,
    packed,
    replicated,
    slots_of,
    unbalanced,
)

LOADS = drawn_loads()
EVEN = ((1 / 256,) * 256,)


def test_drawn_loads_are_as_uneven_as_measured_on_32_ranks() -> None:
    assert unbalanced(32, LOADS) - 1 == pytest.approx(UNBALANCED_EXCESS, rel=0.02)


def test_copies_even_loads_out() -> None:
    assert balanced(32, 32, LOADS) == pytest.approx(1 + BALANCED_EXCESS, abs=0.01)
    assert balanced(32, 32, LOADS) < unbalanced(32, LOADS)
    # two slots a rank cannot: the reference algorithm has 0.48 at EP144 on other loads
    assert 1.2 < balanced(144, 32, LOADS) < 1.7


def test_even_loads_leave_what_changes_meanwhile() -> None:
    assert unbalanced(64, EVEN) == pytest.approx(1)
    assert balanced(32, 0, EVEN) == pytest.approx(1 + BALANCED_EXCESS)


def test_slots_by_hand() -> None:
    assert [slots_of(ranks) for ranks in (8, 32, 72, 144, 288)] == [36, 9, 4, 2, 1]
    assert slots_of(8, 0) == 32


@given(
    st.lists(st.floats(0.01, 10), min_size=4, max_size=12),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_nothing_is_lost_by_copying_and_packing(
    shares: list[float], ranks: int, further: int
) -> None:
    copies = -(-(len(shares) + further) // ranks) * ranks
    loads = replicated(shares, copies)
    assert len(loads) == copies
    assert sum(loads) == pytest.approx(sum(shares))
    of_ranks = packed(loads, ranks)
    assert len(of_ranks) == ranks
    assert sum(of_ranks) == pytest.approx(sum(shares))


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_packing_is_near_the_best_of_all_ways(loads: list[float]) -> None:
    best = min(
        max(sum(loads[i] for i in half), sum(loads) - sum(loads[i] for i in half))
        for half in itertools.combinations(range(6), 3)
    )
    # The bound of taking the heaviest first.
    assert best - 1e-9 <= max(packed(loads, 2)) <= 1.5 * best


@pytest.mark.parametrize(("ranks", "rows"), [(8, 200), (32, 64), (72, 512)])
def test_chance_against_drawing(ranks: int, rows: int) -> None:
    draw, tries = random.Random(1), 20
    total = 0
    for _ in range(tries):
        counts = [0] * ranks
        for _ in range(ranks * rows):
            counts[draw.randrange(ranks)] += 1
        total += max(counts)
    # sqrt(2 ln n) standard deviations bound the largest of n from above
    assert total / tries == pytest.approx(busiest_rows(rows, ranks, 1.0), rel=0.06)
    assert total / tries <= busiest_rows(rows, ranks, 1.0)

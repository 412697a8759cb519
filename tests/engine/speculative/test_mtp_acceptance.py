"""How often drafts are right: each average follows what was looked at, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.speculative.acceptance import (
    DEEPER_WEIGHT,
    LEVELS,
    RATE,
    RATE_WEIGHT,
    Acceptance,
)

ROWS = 8


def checked_one_by_one(rates: list[float], drafted: int, accepted: int) -> list[float]:
    """The rates of one sequence, depth by depth."""
    rates = rates.copy()
    for depth in range(len(rates)):
        if depth < drafted and depth <= accepted:
            rates[depth] += RATE_WEIGHT * ((depth < accepted) - rates[depth])
        elif 0 < drafted <= depth and accepted >= drafted - 1:
            rates[depth] += DEEPER_WEIGHT * ((drafted == accepted) - rates[depth])
    return rates


@given(data=st.data(), most=st.integers(1, 3))
def test_rates_follow_the_drafts_that_were_looked_at(data: st.DataObject, most: int) -> None:
    acceptance = Acceptance(most, ROWS)
    want = {batch_row: [RATE] * most for batch_row in range(ROWS)}
    for _ in range(data.draw(st.integers(1, 12))):
        batch_rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
        drafted = [data.draw(st.integers(0, most)) for _ in batch_rows]
        accepted = [data.draw(st.integers(0, count)) for count in drafted]
        acceptance.checked(np.array(batch_rows), np.array(drafted), np.array(accepted))
        for batch_row, count, right in zip(batch_rows, drafted, accepted, strict=True):
            want[batch_row] = checked_one_by_one(want[batch_row], count, right)
    np.testing.assert_allclose(acceptance.rates, [want[batch_row] for batch_row in range(ROWS)])


def test_a_new_sequence_begins_with_what_others_had() -> None:
    acceptance = Acceptance(2, ROWS)
    for _ in range(40):
        for _ in range(100):
            acceptance.checked(np.array([0, 1]), np.array([2, 2]), np.array([1, 1]))
        acceptance.take_row(0)  # whoever had it is gone
    acceptance.take_row(5)
    assert acceptance.rates[5, 0] > 0.9
    assert acceptance.rates[5, 1] < 0.1
    assert acceptance.rates[6].tolist() == [RATE, RATE]


def test_a_chance_is_that_of_all_drafts_so_far() -> None:
    acceptance = Acceptance(3, ROWS)
    batch_rows = np.array([3, 1])
    first = acceptance.drawn(batch_rows, 1, np.array([0.99, 0.3]))
    np.testing.assert_allclose(first, [(LEVELS - 0.5) / LEVELS, 2.5 / LEVELS])
    second = acceptance.drawn(batch_rows[:1], 2, np.array([0.6]))
    np.testing.assert_allclose(second, first[:1] * 4.5 / LEVELS)
    np.testing.assert_allclose(acceptance.drawn(batch_rows, 1, np.array([0.99, 0.3])), first)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_the_ends_have_a_level(probability: float) -> None:
    chance = Acceptance(2, ROWS).drawn(np.array([0]), 1, np.array([probability]))
    assert abs(chance[0] - probability) < 1 / LEVELS


def test_a_layer_that_is_too_sure_is_found_out_level_by_level() -> None:
    acceptance = Acceptance(2, ROWS)
    random = np.random.default_rng(3)
    batch_rows = np.arange(4)
    for _ in range(600):
        sure = np.where(random.random(4) < 0.5, 0.95, 0.2)
        acceptance.drawn(batch_rows, 1, sure)
        right = random.random(4) < np.where(sure > 0.5, 0.4, 0.2)  # 0.4 of what says 0.95
        acceptance.checked(batch_rows, np.ones(4, np.int64), right.astype(np.int64))
    chances = acceptance.drawn(batch_rows[:2], 1, np.array([0.95, 0.2]))
    np.testing.assert_allclose(chances, [0.4, 0.2], atol=0.12)
    untouched = acceptance.drawn(batch_rows[:1], 1, np.array([0.5]))
    assert untouched[0] == 4.5 / LEVELS


def test_drafts_that_were_not_looked_at_tell_nothing() -> None:
    """Of three drafts the first was wrong: nothing is known of the second."""
    acceptance = Acceptance(3, ROWS)
    for _ in range(50):
        acceptance.drawn(np.array([0]), 1, np.array([0.2]))
        acceptance.drawn(np.array([0]), 2, np.array([0.9]))
        acceptance.checked(np.array([0]), np.array([3]), np.array([0]))
    chances = acceptance.drawn(np.array([0, 1]), 1, np.array([0.9, 0.2]))
    assert chances[0] == (LEVELS - 0.5) / LEVELS
    assert chances[1] < 0.1

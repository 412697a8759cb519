"""What a row costs is found in steps that are noisy, on a machine that gets faster and slower."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.speculative.row_cost import RowCost


def test_the_cost_of_rows_is_found() -> None:
    cost = RowCost(0.5)
    for rows in [1, 2, 4, 2, 1, 3, 4, 1] * 4:
        cost.note(rows, 5.0 + 0.5 * rows)
    assert cost.at(np.array([0.0, 8.0])).tolist() == pytest.approx([5.0, 9.0], rel=0.05)


def test_a_cost_stands_while_the_number_of_rows_does_not_change() -> None:
    cost = RowCost(0.5)
    for rows in [1, 2, 4, 2] * 8:
        cost.note(rows, 5.0 + 0.5 * rows)
    for _ in range(1000):
        cost.note(4, 7.0)
    assert cost.each == pytest.approx(0.5, rel=0.05)
    for _ in range(200):
        cost.note(4, 14.0)  # twice as slow
    assert cost.at(np.array(4.0)) == pytest.approx(14.0, rel=0.01)


def test_a_clock_that_stands_still_is_survived() -> None:
    cost = RowCost(0.5)
    for rows in [1, 2, 4, 2] * 8:
        cost.note(rows, 0.0)
    for rows in [1, 2, 4, 2] * 200:
        cost.note(rows, 5.0 + 0.5 * rows)
    assert cost.at(3) == pytest.approx(6.5, rel=0.05)


def test_an_outlier_counts_little() -> None:
    cost = RowCost(0.5)
    for rows in [1, 2, 4, 2] * 8:
        cost.note(rows, 5.0 + 0.5 * rows)
    cost.note(2, 5000.0)
    assert float(cost.at(np.array(2.0))) < 7.0


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_gets_slower_is_not_taken_for_rows_that_cost_much(seed: int) -> None:
    cost, random = RowCost(0.5), np.random.default_rng(seed)
    for step in range(600):
        rows = 8 + 3 * (step % 64 < 1)  # a probe now and then
        state = np.exp(0.2 * np.sin(step / 40)) * (1 + 0.02 * random.standard_normal())
        cost.note(rows, (5.0 + 2.5 * rows) * state)
    assert cost.each / cost.at(8) == pytest.approx(2.5 / 25, rel=0.2)


def test_what_rows_cost_now_is_found_out() -> None:
    cost = RowCost(0.5)
    for step in range(400):
        rows = 4 + 3 * (step % 64 < 1)
        cost.note(rows, 5.0 + (0.5 if step < 200 else 2.0) * rows)
    assert cost.each == pytest.approx(2.0, rel=0.2)

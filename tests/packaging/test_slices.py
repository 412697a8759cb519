"""The slice of a matrix of cases that `make test` runs."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from helpers.slices import Case, cover, spread


def grid(*sizes: int) -> list[Case]:
    return [tuple((str(n), i) for n, i in enumerate(at)) for at in product(*map(range, sizes))]


def test_a_grid_needs_as_many_cases_as_its_longest_side() -> None:
    assert cover(grid(4, 2)) == [0, 3, 4, 6]
    assert [len(cover(grid(*sizes))) for sizes in ((5,), (3, 3), (2, 3, 4))] == [5, 3, 4]
    assert cover([]) == []


def test_some_cases_reach_from_the_first_to_the_last() -> None:
    assert [spread(9, cases) for cases in (1, 2, 3, 9, 12)] == [
        [0],
        [0, 8],
        [0, 4, 8],
        list(range(9)),
        list(range(9)),
    ]


@given(st.lists(st.tuples(*(st.integers(0, 3) for _ in range(3))), min_size=1))
def test_no_value_is_left_out(rows: list[tuple[int, int, int]]) -> None:
    cases: list[Case] = [tuple((str(n), i) for n, i in enumerate(row)) for row in rows]
    chosen = cover(cases)
    assert {value for i in chosen for value in cases[i]} == {v for case in cases for v in case}
    assert len(chosen) == len(set(chosen)) <= 12

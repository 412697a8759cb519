"""What `make test` leaves to `make test-all`: combinations of parameters, and tests that are thorough for much time.

A test with the mark `matrix` runs so many of its cases that every value of every parameter is met at least once; with
`matrix(cases=3)` three of its cases, from the first to the last. One with the mark `thorough` does not run at all. With
`--all` everything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

Case = tuple[tuple[str, int], ...]  # each parameter, and which value it has


def cover(cases: Sequence[Case]) -> list[int]:
    """Places of few cases that hold every value of all. Of two that are as good the earlier one is taken."""
    missing = {value for case in cases for value in case}
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(missing.intersection(cases[i])))
        missing.difference_update(cases[best])
        chosen.append(best)
    return sorted(chosen)


def spread(count: int, cases: int) -> list[int]:
    """Places of `cases` out of `count`, as far from each other as possible."""
    if cases >= count:
        return list(range(count))
    return [0] if cases == 1 else [round(i * (count - 1) / (cases - 1)) for i in range(cases)]


def places(config: pytest.Config, count: int, cases: int) -> Sequence[int]:
    """What a test that tries `count` things one by one tries of them: all with `--all`, else so many."""
    return range(count) if config.option.all_cases else spread(count, cases)


def parameters(item: pytest.Item) -> Case:
    """Those of the test's case. All cases have one object for one value; not every value can be hashed."""
    call = getattr(item, "callspec", None)
    return tuple((name, id(value)) for name, value in call.params.items()) if call else ()


def keep_slice(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only `--all` runs."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    dropped: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            dropped.add(item)
        elif parameters(item) and item.get_closest_marker("matrix") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("matrix")
        number = mark.kwargs.get("cases") if mark is not None else None
        if number is None:
            kept = cover([parameters(item) for item in cases])
        else:
            kept = spread(len(cases), number)
        dropped.update(item for i, item in enumerate(cases) if i not in kept)
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]

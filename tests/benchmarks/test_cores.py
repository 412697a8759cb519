"""Which cores a router, its workers and their clients get."""

from __future__ import annotations

import os
import subprocess

import pytest

from bench.router.cores import on, places, powers_of_two


@pytest.mark.parametrize(
    ("cores", "router", "workers", "clients"),
    [
        ([0, 1], [0], [1], [1]),
        ([4, 5, 6, 7], [4, 5], [6], [7]),
        (list(range(16)), list(range(8)), [8, 9], list(range(10, 16))),
    ],
)
def test_a_router_shares_its_cores_with_nobody(
    cores: list[int], router: list[int], workers: list[int], clients: list[int]
) -> None:
    found = places(cores)
    assert (found.router, found.workers, found.clients) == (router, workers, clients)


def test_numbers_of_cores_double() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(12) == [1, 2, 4, 8]


def test_a_command_runs_where_it_is_told_to() -> None:
    core = min(os.sched_getaffinity(0))
    program = "import os; print(*os.sched_getaffinity(0))"
    command = [*on([core]), on([core])[0], "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(core)]

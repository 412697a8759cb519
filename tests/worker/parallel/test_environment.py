"""What torchrun says of a group, and what it cannot say."""

from __future__ import annotations

import pytest

from headrace.settings.values import SettingsError
from headrace.worker.parallel.environment import read_environment
from helpers.worker.rank_processes import variables


@pytest.mark.parametrize("found", [{}, {"WORLD_SIZE": "1"}, {"RANK": "7", "MASTER_PORT": "x"}])
def test_without_a_second_rank_there_is_no_group(found: dict[str, str]) -> None:
    assert read_environment(found) is None


def test_a_rank_knows_its_place_and_where_the_group_meets() -> None:
    found = read_environment(variables(3, 4, 1234) | {"TORCHELASTIC_RUN_ID": "job 7"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 3, 4)
    assert (found.host, found.port, found.run) == ("127.0.0.1", 1234, "job 7")
    assert not found.keeps_store


@pytest.mark.parametrize(
    ("rank", "agent", "keeps"),
    [(0, {}, True), (0, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, False), (1, {}, False)],
)
def test_rank_0_keeps_the_store_where_torchrun_does_not(
    rank: int, agent: dict[str, str], keeps: bool
) -> None:
    found = read_environment(variables(rank, 2, 1) | agent)
    assert found is not None
    assert found.keeps_store is keeps


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    found = variables(0, 2, 1)
    del found[name]
    with pytest.raises(SettingsError, match=f"{name} is not set; start the group with torchrun"):
        read_environment(found)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("RANK", "2", "0 to 1, as WORLD_SIZE is 2"),
        ("RANK", "-1", "0 to 1"),
        ("RANK", "one", "0 to 1"),
        ("RANK", "", "0 to 1"),
        ("RANK", "٣", "0 to 1"),
        ("WORLD_SIZE", "0", "1 to 1024"),
        ("WORLD_SIZE", "100000", "1 to 1024"),
        ("WORLD_SIZE", "2.0", "1 to 1024"),
        ("LOCAL_RANK", "2", "0 to 1"),
        ("LOCAL_WORLD_SIZE", "3", "1 to 2"),
        ("MASTER_PORT", "65536", "1 to 65535"),
        ("MASTER_PORT", "0", "1 to 65535"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "0 to"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_can(name: str, value: str, why: str) -> None:
    with pytest.raises(
        SettingsError, match=f"{name} is '{value}'; it must be a whole number from {why}"
    ):
        read_environment(variables(0, 2, 1) | {name: value})

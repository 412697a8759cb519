"""Ranks of a group on this machine, and the port where they meet."""

import socket

import pytest

from headrace.cli.children.process import Command
from headrace.cli.children.ranks import GROUP_PORTS, LOOPBACK, free_group_port, rank_commands


def test_all_ranks_are_told_of_one_port_that_no_system_gives_to_others() -> None:
    command = Command(name="w", argv=["worker"], env={"A": "b"})
    ranks = rank_commands(command, 3)
    assert [rank.name for rank in ranks] == ["w-rank-0", "w-rank-1", "w-rank-2"]
    assert [(rank.env["A"], rank.env["RANK"], rank.env["WORLD_SIZE"]) for rank in ranks] == [
        ("b", str(rank), "3") for rank in range(3)
    ]
    [port] = {int(rank.env["MASTER_PORT"]) for rank in ranks}
    assert port in GROUP_PORTS
    assert GROUP_PORTS.stop <= 32_768


def test_a_port_that_somebody_has_is_passed_over_and_none_that_is_free_is_an_error() -> None:
    port = free_group_port(GROUP_PORTS)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, port))
        with pytest.raises(OSError, match=f"no port from {port} to {port} of {LOOPBACK} is free"):
            free_group_port(range(port, port + 1))
    assert free_group_port(range(port, port + 1)) == port

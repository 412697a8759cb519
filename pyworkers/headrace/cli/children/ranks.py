"""The processes of a worker that is a group of ranks on this machine, as torchrun would start them."""

from __future__ import annotations

import socket
from dataclasses import replace

from headrace.cli.children.process import Command

LOOPBACK = "127.0.0.1"


def rank_name(worker: str, rank: int) -> str:
    """Of one rank among the workers of a fleet, as it names itself."""
    return f"{worker}-rank-{rank}"


def rank_commands(worker: Command, ranks: int) -> list[Command]:
    """One for each rank. Each start of the group has a port of its own, so that no rank of an earlier one finds it."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": worker.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return [
        replace(
            worker,
            name=rank_name(worker.name, rank),
            env=worker.env | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]

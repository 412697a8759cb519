"""The processes of a worker that is a group of ranks on this machine, as torchrun would start them."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

from headrace.cli.children.process import Command

LOOPBACK = "127.0.0.1"

# Below those that systems give to whoever asks for any port, from 32,768 on Linux and 49,152 elsewhere: another
# program could be given one of them before rank 0 listens, which takes it a second or more.
GROUP_PORTS = range(20_000, 32_768)
# Ports to look at; that so many are taken on one machine does not happen. A guess.
ATTEMPTS = 100


def rank_name(worker: str, rank: int) -> str:
    """Of one rank among the workers of a fleet, as it names itself."""
    return f"{worker}-rank-{rank}"


def free_group_port(ports: range) -> int:
    """A port of the loopback interface, one of `ports`, that nobody has now.

    Raises:
        OSError: Of those it looked at none is free.
    """
    for port in random.sample(ports, min(ATTEMPTS, len(ports))):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(
        f"no port from {ports.start} to {ports.stop - 1} of {LOOPBACK} is free for a group"
    )


def rank_commands(worker: Command, ranks: int) -> list[Command]:
    """One for each rank. Each start of the group has a port of its own, so that no rank of an earlier one finds it."""
    port = free_group_port(GROUP_PORTS)
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

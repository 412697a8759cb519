"""How `headrace serve` starts its router and its workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.cli.children.process import Command
from headrace.cli.children.ranks import rank_commands
from headrace.cli.console import Printer
from headrace.cli.serving.config import ServeSettings
from headrace.cli.supervise import Keeper

ONE_THREAD = {  # a machine's cores are shared out by the number of workers
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def router_command(config: ServeSettings, folder: Path) -> Command:
    return Command(
        name="router",
        argv=[
            *(sys.executable, "-m", "headrace", "router"),
            *config.router_argv,
            f"--port={config.port}",
            *worker_addresses(config, folder / "router.sock"),
            f"--admin-listen=unix:{folder / 'admin.sock'}",
        ],
        env=secret_env(config),
    )


def worker_addresses(config: ServeSettings, private: Path) -> list[str]:
    """Where workers dial in: ours at a private socket, and others where we were told to let them in."""
    if config.worker_listen is None:
        return [f"--worker-listen=unix:{private}"]
    return [f"--worker-listen={config.worker_listen}", f"--worker-socket={private}"]


def secret_env(config: ServeSettings) -> dict[str, str]:
    """The secret of workers that nobody typed, for the children."""
    return {} if config.secret is None else {"HEADRACE_SECRET": config.secret}


def worker_command(config: ServeSettings, folder: Path, name: str, role: str) -> Command:
    return Command(
        name=name,
        argv=[
            *(sys.executable, "-m", "headrace", "worker"),
            *config.worker_argv,
            "--log-requests-per-s=0",  # the router's lines say the same, and more
            f"--name={name}",
            f"--role={role}",
            f"--router=unix:{folder / 'router.sock'}",
        ],
        env={name: value for name, value in ONE_THREAD.items() if name not in os.environ}
        | {"WORLD_SIZE": "1"}  # whatever started us: `rank_commands` makes the groups here
        | secret_env(config),
    )


def worker_keeper(config: ServeSettings, command: Command, log: Printer) -> Keeper:
    """Keeps a worker running, all its ranks as one."""
    if config.ranks == 1:
        return Keeper(command, log)
    return Keeper(command, log, ranks=lambda: rank_commands(command, config.ranks))

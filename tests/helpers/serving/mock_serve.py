"""`headrace serve` whose workers are `headrace mock`: supervised like real ones, there at once, and soon there again.

Run as a program: python -m helpers.serving.mock_serve ARGUMENTS OF SERVE
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.cli import main, serve
from headrace.cli.children.process import Command
from headrace.cli.console import Printer, StopSignals
from headrace.cli.serving import announce, commands
from headrace.cli.serving.config import ServeSettings
from headrace.cli.serving.model import ServedAs
from headrace.cli.supervise import Keeper, RestartRule

worker_command = commands.worker_command


def mock_command(config: ServeSettings, folder: Path, name: str, role: str) -> Command:
    """The mock adds a number to the name, which is 0."""
    real = worker_command(config, folder, name, role)
    if "MOCK_FAILS" in os.environ:
        return replace(real, argv=[sys.executable, "-c", "print('no luck'); raise SystemExit(3)"])
    argv = [
        *(sys.executable, "-m", "headrace", "mock", "--workers=1"),
        f"--name={name.removesuffix('0')}",
        f"--router=unix:{folder / 'router.sock'}",
    ]
    return replace(real, argv=argv)


async def no_model(_config: ServeSettings, _stop: StopSignals, _log: Printer) -> ServedAs:
    """Nothing to fetch."""
    return ServedAs(device="cpu", dtype="float32")


if __name__ == "__main__":
    soon = RestartRule(first_delay_s=0.01, longest_delay_s=0.1)
    for module in (serve, commands):
        module.Keeper = partial(Keeper, rule=soon)  # pyright: ignore[reportAttributeAccessIssue]
    announce.POLL_S = 0.02  # the mock is there sooner than this
    serve.worker_command = mock_command
    serve.fetch_model = no_model
    sys.exit(main.main(["serve", *sys.argv[1:]]))

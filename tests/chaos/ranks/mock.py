"""Groups of mock ranks: `headrace mock --ep N`, real but for the model, so that many faults take little time."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path
from typing import Final

from chaos.fleet import ROUTER_FLAGS, environment
from chaos.load import BLOCK_TOKENS
from chaos.ranks.seam import GroupFault, Struck, eventually

GROUPS: Final = 2
RANKS: Final = 4
DEADLINE_MS: Final = 1_000

# Where in a step a rank can stand still.
PHASES: Final = ("agree", "dispatch", "combine", "draft")


class MockRanks:
    """A router and `headrace mock`, which takes faults on its standard input."""

    sizes = (RANKS,) * GROUPS
    kinds = (
        "kill",
        "freeze",
        *(f"stall {phase}" for phase in PHASES),
        "late",
        "wrong size",
        "wrong weights",
    )
    back_within_s = 30.0  # of the group deadline, dials that back off, and a busy machine

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self.model = "mock"
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        router = ["router", "--port=0", "--worker-listen=127.0.0.1:0", *ROUTER_FLAGS]
        await self._start("router", *router, "--policy=kv")
        line = r"http://\S+:(\d+) for clients, (\S+) for workers"
        found = await eventually(lambda: re.search(line, self._log("router")), 60)
        if found is None:
            raise AssertionError(f"no router: {self._log('router')}")
        self.port = int(found[1])
        await self._start(
            "mock",
            *("mock", "--router", found[2], "--control", "--workers", str(GROUPS * RANKS)),
            *("--ep", str(RANKS), "--group-deadline", str(DEADLINE_MS)),
            *("--cost", "8,0.02,0,0.1,0", "--batched-tokens", "256"),
            *("--block-tokens", str(BLOCK_TOKENS), "--blocks", "2048"),
        )

    async def _start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as output:
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "headrace", *command),
                    env=environment(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                )
            )

    async def stop(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def strike(self, fault: GroupFault) -> Struck:
        worker = f"w{fault.group * RANKS + fault.rank}"
        lost = rf"group lost with a rank.*\b{worker}\b|\b{worker}\b.*group lost with"
        anew = rf"\[{fault.rank}\], so its group starts anew"
        match fault.kind.split():
            case ["kill"]:
                named = self._tell(lost, f"{worker}:die")
            case ["freeze"]:
                named = self._tell(rf"{lost}|{anew}", f"{worker}:freeze")
            case ["stall", phase]:
                named = self._tell(anew, f"{worker}:stall={phase}")
            case ["late"]:
                named = self._tell(lost, f"{worker}:die@0-2500ms")
            case ["wrong", what]:
                field = r"group\.size" if what == "size" else r"fingerprints\.weights"
                named = self._tell(field, f"{worker}:wrong-{what}@0-2500ms", f"{worker}:die")
            case _:
                raise AssertionError(fault.kind)
        return Struck(f"{fault.kind} of {worker}", named)

    def _tell(self, named: str, *faults: str) -> str:
        stdin = self._processes[1].stdin
        assert stdin is not None
        stdin.write("".join(f"{fault}\n" for fault in faults).encode())
        return named

    async def named(self, fault: GroupFault) -> None:
        """Nothing is left to do."""

    def logged(self) -> list[str]:
        return [self._log("router"), self._log("mock")]

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    async def left(self) -> list[str]:
        return []

    @property
    def crashed(self) -> int:
        return sum(process.returncode is not None for process in self._processes)

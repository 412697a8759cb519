"""Groups of real ranks: `headrace worker` with a tiny DeepSeek, one group of two and one of four.

While one group is struck the other one survives. The two go by different transports, and both draft.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from chaos.fleet import ROUTER_FLAGS, WORKER_FLAGS, environment
from chaos.inside.rank_steps import IN_EXCHANGE, IN_PYTHON, LATE_S, PHASES
from chaos.inside.seams import NO_MEMORY
from chaos.ranks.forks import ForkKeeper, Forks
from chaos.ranks.seam import GroupFault, Struck, eventually
from headrace.cli.children.process import Command
from headrace.cli.children.ranks import rank_commands, rank_name
from headrace.exit_status import EXIT_CONFIG, EXIT_RANK_LOST
from helpers.models.tiny_deepseek import tiny_deepseek

GROUPS: Final[Mapping[str, int]] = {"two": 2, "four": 4}
TRANSPORTS: Final[Mapping[str, str]] = {"two": "gloo", "four": "shared-memory"}
DEADLINE_MS: Final = 3_000  # a loaded machine pauses processes for a part of it
START_TIMEOUT_S: Final = 20
LATE: Final = 2.5
REACHED_WITHIN_S: Final = 60.0
GRACEFUL: Final = (0, EXIT_RANK_LOST, EXIT_CONFIG)

Start: TypeAlias = Callable[[Command], Command]
"""What a rank is started with, from what it would be started with."""


class RealRanks:
    """A router, a process that forks, and a supervisor for each group."""

    sizes = tuple(GROUPS.values())
    kinds = (
        *(f"kill {phase}" for phase in PHASES),
        *(f"freeze {phase}" for phase in PHASES),
        # they wake up once they were given up: their group must not notice, nor the next start of it
        *(f"nap {phase}" for phase in PHASES),
        *(f"no-memory {phase}" for phase in PHASES),
        "late start",
        "absent start",
        "wrong size",
        "wrong weights",
    )
    back_within_s = (
        60.0  # of two deadlines, the supervisor's patience, and six processes on a busy machine
    )

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self.model = "tiny"
        self._folder = folder
        self._forks = Forks(folder)
        self._router: asyncio.subprocess.Process | None = None
        self._keepers: list[ForkKeeper] = []
        self._kept: list[asyncio.Task[None]] = []
        self._next: dict[str, Start] = {}  # how a rank is to start once, by its name
        self._napping: str | None = None
        self._weights: dict[str, Path] = {}

    async def start(self) -> None:
        for name, seed in (("right", 0), ("wrong", 1)):
            path = self._folder / name
            self._weights[name] = tiny_deepseek(path, seed, mtp=True, max_position_embeddings=2048)
        workers = await self._start_router()
        await self._forks.start()
        for group in GROUPS:
            command = Command(name=group, argv=self._worker_argv(group, workers))
            ranks = partial(self._rank_commands, command)
            keeper = ForkKeeper(self._forks, group, ranks, self._say)
            self._keepers.append(keeper)
            self._kept.append(asyncio.create_task(keeper.run(), name=group))

    async def _start_router(self) -> str:
        log = self._folder / "router.log"
        with log.open("wb") as output:
            self._router = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace", "router", "--port=0"),
                # so that each rank has requests to be struck in: kv gives all to the group that is faster
                *("--worker-listen=127.0.0.1:0", "--policy=round-robin", *ROUTER_FLAGS),
                env=environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
        line = r"http://\S+:(\d+) for clients, (\S+) for workers"
        found = await eventually(lambda: re.search(line, log.read_text()), 60)
        if found is None:
            raise AssertionError(f"no router: {log.read_text()}")
        self.port = int(found[1])
        return found[2]

    def _worker_argv(self, group: str, router: str) -> list[str]:
        return [
            str(self._weights["right"]),
            *WORKER_FLAGS,
            *(f"--name={group}", f"--router={router}", f"--served-model-name={self.model}"),
            # at all steps: whether a draft pays is for the machine to say, and a fault has to meet one
            *("--mtp=1", "--mtp-fixed", f"--ep-transport={TRANSPORTS[group]}"),
            *(f"--ep-timeout-ms={DEADLINE_MS}", f"--ep-start-timeout-s={START_TIMEOUT_S}"),
        ]

    def _rank_commands(self, command: Command) -> list[Command]:
        """As `headrace serve` makes them, but for a rank that is to start in another way this time."""
        commands = rank_commands(command, GROUPS[command.name])
        return [self._next.pop(one.name, _unchanged)(one) for one in commands]

    def _say(self, name: str, line: str) -> None:
        with (self._folder / "supervisor.log").open("a") as log:
            log.write(f"{name} | {line}\n")

    async def stop(self) -> None:
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        await self._forks.stop()
        if self._router is not None:
            with contextlib.suppress(ProcessLookupError):
                self._router.kill()
            await self._router.wait()

    # --- faults ---

    async def strike(self, fault: GroupFault) -> Struck:
        for keeper in self._keepers:
            keeper.ready()  # all were: so none is given up, whatever follows
        group, rank = list(GROUPS)[fault.group], fault.rank
        what, where = fault.kind.split()
        if where in IN_EXCHANGE and TRANSPORTS[group] == "shared-memory":
            rank = IN_PYTHON[rank % len(IN_PYTHON)]
        name = rank_name(group, rank)
        told, lost = f"{fault.kind} of {name}", rf"rank {rank} is lost"
        match what, where:
            case "late", _:
                return self._restart(told, name, lost, _with(LATE_S, str(LATE)))
            case "absent", _:
                absent = rf"rank {rank} (of \d+ )?did not come"
                return self._restart(told, name, absent, _with(LATE_S, "3600"))
            case "wrong", "size":
                size = str(GROUPS[group] + 1)
                named = rf"WORLD_SIZE is .*\b{size}\b"
                return self._restart(told, name, named, _with("WORLD_SIZE", size))
            case "wrong", "weights":
                named = rf"rank {rank or 1} \(.*differs from rank 0 \(.*: its model is"
                return self._restart(told, name, named, self._with_wrong_weights)
            case "kill", phase:
                return await self._at(phase, "kill", fault, told, name, lost)
            case "freeze", phase:
                return await self._at(phase, "freeze", fault, told, name, lost)
            case "nap", phase:
                struck = await self._at(phase, "freeze", fault, told, name, lost)
                self._napping = name
                return struck
            case _, phase:
                assert what == "no-memory", fault.kind
                # before they agree no other rank hears of it
                who = "" if phase == "agree" else f"rank {rank} failed: "
                named = f"{who}MemoryError: {NO_MEMORY}"
                struck = await self._at(phase, "no memory", fault, told, name, named)
                return replace(struck, anew=False)

    async def _at(
        self, phase: str, do: str, fault: GroupFault, told: str, name: str, named: str
    ) -> Struck:
        await self._forks.strike(name, phase, do, fault.nth, REACHED_WITHIN_S)
        return Struck(told, named)

    def _restart(self, told: str, name: str, named: str, start: Start) -> Struck:
        """The rank dies, and starts in this way."""
        self._next[name] = start
        self._forks.now[name].signal(signal.SIGKILL)
        return Struck(told, named)

    def _with_wrong_weights(self, command: Command) -> Command:
        return replace(command, argv=[str(self._weights["wrong"]), *command.argv[1:]])

    async def named(self, fault: GroupFault) -> None:  # noqa: ARG002
        """A rank that only took a nap wakes up."""
        if self._napping is not None:
            self._forks.now[self._napping].signal(signal.SIGCONT)
            self._napping = None

    # --- what came of it ---

    def logged(self) -> list[str]:
        ranks = [rank_name(group, rank) for group, size in GROUPS.items() for rank in range(size)]
        return [self._log(name) for name in ("router", "supervisor", *ranks)]

    def _log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def left(self) -> list[str]:
        found = [(name, await self._forks.checked(name)) for name in self._forks.now]
        return [f"{name}: {error}" for name, error in found if error]

    @property
    def crashed(self) -> int:
        router = self._router is None or self._router.returncode is not None
        supervisors = sum(task.done() for task in self._kept)
        return router + self._forks.gone + supervisors + len(self.ended_badly)

    @property
    def ended_badly(self) -> list[str]:
        """Ranks that neither were killed nor said why they end."""
        ends = self._forks.statuses
        return [f"{name}: status {one}" for name, one in ends if one > 0 and one not in GRACEFUL]


def _unchanged(command: Command) -> Command:
    return command


def _with(name: str, value: str) -> Start:
    return lambda command: replace(command, env=command.env | {name: value})

"""Groups of ranks under a crowd: ranks die, stand still, come late or do not fit, and their group comes back whole.

The ranks are those of `headrace mock --ep N`, real but for the model: tokens follow from seed and position, so every
answer can be compared with that of an undisturbed run. What else can break ranks in these phases has to be a `Ranks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from chaos.clients import call
from chaos.crowd import Crowd
from chaos.fleet import POLL_S, ROUTER_FLAGS, environment
from chaos.load import BLOCK_TOKENS, KINDS, requests
from chaos.report import spread

T = TypeVar("T")

GROUPS: Final = 2
RANKS: Final = 4
GROUP_DEADLINE_MS: Final = 1_000
BACK_WITHIN_S: Final = 30.0  # of the group deadline, dials that back off, and a busy machine
IDLE_WITHIN_S: Final = 20.0

# Where in a step a rank can stand still.
PHASES: Final = ("agree", "dispatch", "combine", "draft")
FAULTS: Final = (
    "kill",
    "freeze",
    *(f"stall {phase}" for phase in PHASES),
    "late",
    "wrong size",
    "wrong weights",
)
DECIDING: Final = ("mismatched", "failed", "hung", "not_named", "not_back", "left", "crashed")


@dataclass(frozen=True, slots=True)
class GroupFault:
    """`kind` happens to one rank of a group."""

    kind: str
    group: int
    rank: int

    @property
    def worker(self) -> int:
        return self.group * RANKS + self.rank


class Ranks(Protocol):
    """A fleet of groups that can be broken. `strike` returns what the logs have to say of it, as a pattern."""

    port: int
    model: str

    def strike(self, fault: GroupFault) -> str: ...

    def logged(self) -> list[str]: ...

    @property
    def crashed(self) -> int: ...


def plan(seed: int) -> Iterator[GroupFault]:
    """Endless: every kind, in another order each time."""
    rng = random.Random(f"groups {seed}")
    for _ in itertools.count():
        for kind in rng.sample(FAULTS, len(FAULTS)):
            yield GroupFault(kind, rng.randrange(GROUPS), rng.randrange(RANKS))


class MockRanks:
    """A router and `headrace mock`, which takes faults on its standard input."""

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
            *("--ep", str(RANKS), "--group-deadline", str(GROUP_DEADLINE_MS)),
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

    def strike(self, fault: GroupFault) -> str:
        who = f"w{fault.worker}"
        lost = rf"group lost with a rank.*\bw{fault.worker}\b|\bw{fault.worker}\b.*group lost with"
        anew = r"so its group starts anew"
        match fault.kind.split():
            case ["kill"]:
                return self._tell(lost, f"{who}:die")
            case ["freeze"]:
                return self._tell(rf"{lost}|\[{fault.rank}\], {anew}", f"{who}:freeze")
            case ["stall", phase]:
                return self._tell(rf"\[{fault.rank}\], {anew}", f"{who}:stall={phase}")
            case ["late"]:
                return self._tell(lost, f"{who}:die@0-2500ms")
            case ["wrong", what]:
                field = "group.size" if what == "size" else "fingerprints.weights"
                return self._tell(
                    field.replace(".", r"\."), f"{who}:wrong-{what}@0-2500ms", f"{who}:die"
                )
            case _:
                raise AssertionError(fault.kind)

    def _tell(self, named: str, *faults: str) -> str:
        stdin = self._processes[1].stdin
        assert stdin is not None
        stdin.write("".join(f"{fault}\n" for fault in faults).encode())
        return named

    def logged(self) -> list[str]:
        return [self._log("router"), self._log("mock")]

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    @property
    def crashed(self) -> int:
        return sum(process.returncode is not None for process in self._processes)


@dataclass(slots=True)
class GroupReport:
    """What came of the faults."""

    struck: list[str] = field(default_factory=list[str])
    named_ms: list[float] = field(default_factory=list[float])
    back_ms: list[float] = field(default_factory=list[float])
    not_named: list[str] = field(default_factory=list[str])
    not_back: list[str] = field(default_factory=list[str])
    left: list[str] = field(default_factory=list[str])


class GroupSuite:
    """Faults one after another, while the crowd goes on."""

    def __init__(self, ranks: Ranks, crowd: Crowd) -> None:
        self.ranks = ranks
        self.crowd = crowd
        self.report = GroupReport()

    async def run(self, faults: Iterator[GroupFault], clients: int, until_s: float) -> None:
        """Until there are no more faults, or the time (`time.monotonic`) is over; then nothing may be left."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.crowd.serve(clients, stop))
            try:
                for fault in faults:
                    if time.monotonic() >= until_s:
                        break
                    await self._strike(fault)
            finally:
                stop.set()
        await self._check()

    async def _strike(self, fault: GroupFault) -> None:
        before = {group["id"]: group["epoch"] for group in await self.groups()}
        seen = [len(log) for log in self.ranks.logged()]

        def said() -> re.Match[str] | None:
            new = [log[start:] for log, start in zip(self.ranks.logged(), seen, strict=True)]
            return pattern.search("\n".join(new))

        pattern = re.compile(self.ranks.strike(fault))
        struck_s = time.monotonic()
        name = f"{fault.kind} of w{fault.worker}"
        self.report.struck.append(name)
        # before it is whole again somebody has said which rank it was
        named = await eventually(said, BACK_WITHIN_S)
        if named is None:
            self.report.not_named.append(name)
        else:
            self.report.named_ms.append((time.monotonic() - struck_s) * 1e3)

        async def back() -> bool:
            groups = await self.groups()
            whole = len(groups) == GROUPS and all(group["whole"] for group in groups)
            anew = any(group["epoch"] > before.get(group["id"], 0) for group in groups)
            return whole and anew and await self.all_ready()

        deadline_s = time.monotonic() + BACK_WITHIN_S
        while not await back():
            if time.monotonic() > deadline_s:
                self.report.not_back.append(f"{name}: {await self.groups()}")
                return
            await asyncio.sleep(POLL_S)
        self.report.back_ms.append((time.monotonic() - struck_s) * 1e3)

    async def groups(self) -> list[dict[str, Any]]:
        return json.loads(await call(self.ranks.port, "GET", "/workers"))["groups"]

    async def _workers(self) -> list[dict[str, Any]]:
        return json.loads(await call(self.ranks.port, "GET", "/workers"))["workers"]

    async def all_ready(self) -> bool:
        states = [worker["state"] for worker in await self._workers()]
        return states == ["ready"] * (GROUPS * RANKS)

    async def _check(self) -> None:
        """Nothing runs: neither router nor ranks may hold anything."""
        keys = ("booked_requests", "in_flight", "running", "waiting", "blocks_used")

        async def left() -> list[str]:
            workers = await self._workers()
            return [f"{w['id']} {key} {w[key]}" for w in workers for key in keys if w[key]]

        deadline_s = time.monotonic() + IDLE_WITHIN_S
        while found := await left():
            if time.monotonic() > deadline_s:
                self.report.left += found
                return
            await asyncio.sleep(POLL_S)

    def result(self) -> dict[str, Any]:
        """What goes into the file: all of `DECIDING` have to be 0."""
        tally, report = self.crowd.tally, self.report
        examples = [*tally.mismatched, *tally.failed, *tally.hung]
        examples += [*report.not_named, *report.not_back, *report.left]
        return {
            "requests": tally.requests,
            "equal": tally.equal,
            "mismatched": len(tally.mismatched),
            "failed": len(tally.failed),
            "hung": len(tally.hung),
            "not_named": len(report.not_named),
            "not_back": len(report.not_back),
            "left": len(report.left),
            "crashed": self.ranks.crashed,
            "faults": len(report.struck),
            "named_ms": spread(report.named_ms),
            "back_ms": spread(report.back_ms),
            "injected": report.struck,
            "examples": examples[:20],
        }


async def eventually(look: Callable[[], T | None], limit_s: float) -> T | None:
    """What `look` finds in time."""
    deadline_s = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            return None
        await asyncio.sleep(POLL_S)
    return found


@asynccontextmanager
async def opened_groups(folder: Path, seed: int, clients: int) -> AsyncGenerator[GroupSuite]:
    """Mock groups and a crowd that knows what they answer."""
    ranks = MockRanks(folder)
    try:
        await ranks.start()
        # more than clients, so that none is asked twice at once
        crowd = Crowd(ranks, requests(seed, 2 * len(KINDS) + clients * 3 // 2), seed)
        suite = GroupSuite(ranks, crowd)
        deadline_s = time.monotonic() + BACK_WITHIN_S
        while not await suite.all_ready():
            assert time.monotonic() < deadline_s, ranks.logged()
            await asyncio.sleep(POLL_S)
        await crowd.record()
        yield suite
    finally:
        await ranks.stop()


def passed(result: dict[str, Any]) -> bool:
    return all(result[name] == 0 for name in DECIDING)

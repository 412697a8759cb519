"""Groups of ranks under a crowd: ranks die, stand still, come late or do not fit, and their group comes back whole.

The ranks are those of `headrace mock --ep N` (`ranks/mock.py`) or real workers with a tiny DeepSeek
(`ranks/real.py`). Every answer is compared with that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chaos.clients import call
from chaos.crowd import Crowd
from chaos.fleet import POLL_S
from chaos.load import KINDS, requests
from chaos.ranks.mock import MockRanks
from chaos.ranks.real import RealRanks
from chaos.ranks.seam import GroupFault, NotReached, Ranks, Struck, eventually
from chaos.report import spread

IDLE_WITHIN_S: Final = 20.0
DECIDING: Final = (
    "mismatched",
    "failed",
    "hung",
    "not_reached",
    "not_named",
    "not_back",
    "left",
    "crashed",
)


@dataclass(slots=True)
class GroupOutcome:
    """What came of one fault. Times are from the deed."""

    kind: str
    named_ms: float | None = None
    back_ms: float | None = None


@dataclass(slots=True)
class GroupReport:
    """What came of the faults."""

    struck: list[str] = field(default_factory=list[str])
    outcomes: list[GroupOutcome] = field(default_factory=list[GroupOutcome])
    not_reached: list[str] = field(default_factory=list[str])
    not_named: list[str] = field(default_factory=list[str])
    not_back: list[str] = field(default_factory=list[str])
    left: list[str] = field(default_factory=list[str])

    def times(self) -> dict[str, dict[str, Any]]:
        """By kind of fault, as `spread` has them."""
        by_kind: dict[str, list[GroupOutcome]] = defaultdict(list)
        for outcome in self.outcomes:
            by_kind[outcome.kind].append(outcome)
        return {
            kind: {
                "faults": len(found),
                "named_ms": spread([one.named_ms for one in found if one.named_ms is not None]),
                "back_ms": spread([one.back_ms for one in found if one.back_ms is not None]),
            }
            for kind, found in sorted(by_kind.items())
        }


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
        report = self.report
        before = {group["id"]: group["epoch"] for group in await self.groups()}
        seen = [len(log) for log in self.ranks.logged()]
        try:
            struck = await self.ranks.strike(fault)
        except NotReached as error:
            report.not_reached.append(str(error))
            return
        pattern = re.compile(struck.named)

        def said() -> re.Match[str] | None:
            new = [log[start:] for log, start in zip(self.ranks.logged(), seen, strict=True)]
            return pattern.search("\n".join(new))

        report.struck.append(struck.name)
        outcome = GroupOutcome(fault.kind)
        report.outcomes.append(outcome)
        # before it is whole again somebody has said which rank it was
        if await eventually(said, self.ranks.back_within_s) is None:
            report.not_named.append(f"{struck.name}: nothing like {struck.named}")
        else:
            outcome.named_ms = (time.monotonic() - struck.at_s) * 1e3
        await self.ranks.named(fault)
        if await self._back(struck, before):
            outcome.back_ms = (time.monotonic() - struck.at_s) * 1e3
        else:
            report.not_back.append(f"{struck.name}: {await self.groups()}")

    async def _back(self, struck: Struck, before: dict[str, int]) -> bool:
        """Wait until all groups are whole, and one has begun anew where that has to be."""

        async def back() -> bool:
            groups = await self.groups()
            whole = len(groups) == len(self.ranks.sizes) and all(one["whole"] for one in groups)
            anew = any(one["epoch"] > before.get(one["id"], 0) for one in groups)
            return whole and (anew or not struck.anew) and await self.all_ready()

        deadline_s = time.monotonic() + self.ranks.back_within_s
        while not await back():
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def groups(self) -> list[dict[str, Any]]:
        return json.loads(await call(self.ranks.port, "GET", "/workers"))["groups"]

    async def _workers(self) -> list[dict[str, Any]]:
        return json.loads(await call(self.ranks.port, "GET", "/workers"))["workers"]

    async def all_ready(self) -> bool:
        states = [worker["state"] for worker in await self._workers()]
        return states == ["ready"] * sum(self.ranks.sizes)

    async def _check(self) -> None:
        """Nothing runs: neither router nor ranks may hold anything."""
        keys = ("booked_requests", "in_flight", "running", "waiting", "blocks_used")

        async def left() -> list[str]:
            workers = await self._workers()
            return [f"{w['id']} {key} {w[key]}" for w in workers for key in keys if w[key]]

        deadline_s = time.monotonic() + IDLE_WITHIN_S
        while found := await left():
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        self.report.left += found + await self.ranks.left()

    def result(self) -> dict[str, Any]:
        """What goes into the file: all of `DECIDING` have to be 0."""
        tally, report = self.crowd.tally, self.report
        bad = (report.not_reached, report.not_named, report.not_back, report.left)
        examples = [
            *tally.mismatched,
            *tally.failed,
            *tally.hung,
            *(it for one in bad for it in one),
        ]
        return {
            "requests": tally.requests,
            "equal": tally.equal,
            "mismatched": len(tally.mismatched),
            "failed": len(tally.failed),
            "hung": len(tally.hung),
            "not_reached": len(report.not_reached),
            "not_named": len(report.not_named),
            "not_back": len(report.not_back),
            "left": len(report.left),
            "crashed": self.ranks.crashed,
            "faults": len(report.struck),
            "named_ms": spread([o.named_ms for o in report.outcomes if o.named_ms is not None]),
            "back_ms": spread([o.back_ms for o in report.outcomes if o.back_ms is not None]),
            "by_kind": report.times(),
            "injected": report.struck,
            "examples": examples[:20],
        }


@asynccontextmanager
async def opened_groups(
    folder: Path, seed: int, clients: int, *, real: bool = False
) -> AsyncGenerator[GroupSuite]:
    """Groups of ranks, mock or real, and a crowd that knows what they answer."""
    ranks = RealRanks(folder) if real else MockRanks(folder)
    try:
        await ranks.start()
        # more than clients, so that none is asked twice at once
        crowd = Crowd(ranks, requests(seed, 2 * len(KINDS) + clients * 3 // 2), seed)
        suite = GroupSuite(ranks, crowd)
        deadline_s = time.monotonic() + ranks.back_within_s
        while not await suite.all_ready():
            assert time.monotonic() < deadline_s, "\n".join(ranks.logged())
            await asyncio.sleep(POLL_S)
        await crowd.record()
        yield suite
    finally:
        await ranks.stop()


def passed(result: dict[str, Any]) -> bool:
    return all(result[name] == 0 for name in DECIDING)

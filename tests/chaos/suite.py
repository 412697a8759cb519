"""Rounds of clients and faults; between rounds nothing may be left of them anywhere."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.crowd import Crowd
from chaos.faults import Injector, Outcome
from chaos.fleet import ChaosError, Fleet, Host
from chaos.load import KINDS, requests
from chaos.network import ROUTER_HOST, Network, Place
from chaos.plan import Fault, Shape
from helpers.models.tiny_model import tiny_llama

FAULTS_PER_ROUND = 24
IDLE_WITHIN_S = 20.0
BOOKINGS = ("booked_requests", "in_flight", "running", "waiting")
GAUGES = ("headrace_booked_legs", "headrace_streams", "headrace_queue_requests")


@dataclass(slots=True)
class Leaks:
    """What an idle fleet still held. What stays from round to round is counted once."""

    blocks: int = 0
    bookings: int = 0
    found: list[str] = field(default_factory=list[str])
    _blocks_before: int = 0
    _bookings_before: int = 0

    def add(self, blocks: int, bookings: int, what: str) -> None:
        self.blocks += max(blocks - self._blocks_before, 0)
        self.bookings += max(bookings - self._bookings_before, 0)
        self._blocks_before, self._bookings_before = blocks, bookings
        if what:
            self.found.append(what)


@asynccontextmanager
async def opened(
    shape: Shape,
    folder: Path,
    seed: int,
    clients: int,
    places: dict[str, Place] | None = None,
    policy: str = "round-robin",
) -> AsyncGenerator[Suite]:
    """A fleet with a tiny model, and a crowd that knows what it answers. With `places`, each worker has a host.

    Where there are prefill workers, all policies but `kv` split every request; `kv` where that is quicker.
    """
    model = tiny_llama(folder / "model", max_position_embeddings=2048)
    flags = [f"--policy={policy}"]
    async with AsyncExitStack() as stack:
        network = None
        if places is None:
            fleet = Fleet(shape, model, folder, router_flags=flags)
        else:
            network = await stack.enter_async_context(Network(places, seed, folder))
            listen = places[ROUTER_HOST].address
            fleet = Fleet(
                shape, model, folder, hosts=hosts(places), listen=listen, router_flags=flags
            )
        await stack.enter_async_context(fleet)
        # more than clients, so that none is asked twice at once
        crowd = Crowd(fleet, requests(seed, 2 * len(KINDS) + clients * 3 // 2), seed)
        await crowd.record()
        yield Suite(fleet, crowd, Injector(fleet, crowd, seed, network), clients)


def hosts(places: dict[str, Place]) -> dict[str, Host]:
    """By the name of the worker that runs there."""
    return {
        name: Host(name, within=("ip", "netns", "exec", place.namespace))
        for name, place in places.items()
        if name != ROUTER_HOST
    }


class Suite:
    """One fleet, its crowd and what was found."""

    def __init__(self, fleet: Fleet, crowd: Crowd, injector: Injector, clients: int) -> None:
        self.fleet = fleet
        self.crowd = crowd
        self.injector = injector
        self.clients = clients
        self.outcomes: list[Outcome] = []
        self.leaks = Leaks()

    async def run(self, plan: Iterator[Fault], until_s: float, note: Callable[[str], None]) -> None:
        """Rounds until the plan is empty or the time (`time.monotonic`) is over."""
        for number in itertools.count(1):
            faults = list(itertools.islice(plan, FAULTS_PER_ROUND))
            if not faults or time.monotonic() >= until_s:
                return
            outcomes = await self.round(faults, until_s)
            await self.check()
            reached = sum(outcome.reached for outcome in outcomes)
            tally = self.crowd.tally
            note(
                f"round {number}: {reached} of {len(outcomes)} faults, {tally.requests} requests so far, "
                f"{tally.wrong} wrong, {self.leaks.blocks} blocks and {self.leaks.bookings} bookings leaked"
            )

    async def round(self, faults: list[Fault], until_s: float) -> list[Outcome]:
        """All clients at work while the faults come, one after another."""
        stop = asyncio.Event()
        outcomes: list[Outcome] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.crowd.serve(self.clients, stop))
            try:
                for fault in faults:
                    if time.monotonic() >= until_s:
                        break
                    outcomes.append(await self.injector.strike(fault))
            finally:
                stop.set()
        self.outcomes += outcomes
        return outcomes

    @property
    def found(self) -> dict[str, int]:
        """What no request tells."""
        return {
            "leaked_blocks": self.leaks.blocks,
            "leaked_bookings": self.leaks.bookings,
            "crashed": len(self.fleet.crashes),
        }

    async def check(self) -> None:
        """Nothing runs: all blocks and bookings must be free, as router and workers say, and inside the engines."""
        await self.fleet.ready()
        left: dict[str, Any] = {}

        async def idle() -> bool:
            nonlocal left
            left = await self._left()
            return not left

        try:
            await self.fleet.poll(idle, "", IDLE_WITHIN_S)
        except ChaosError:
            blocks = sum(value for name, value in left.items() if name.endswith("blocks_used"))
            bookings = sum(
                value for name, value in left.items() if not name.endswith("blocks_used")
            )
            self.leaks.add(blocks, int(bookings), f"left in an idle fleet: {left}")
        else:
            self.leaks.add(0, 0, "")
        for worker in self.fleet.workers.values():
            if error := await self.fleet.checked(worker):
                self.leaks.blocks += 1
                self.leaks.found.append(f"{worker.name}: {error}")

    async def _left(self) -> dict[str, float]:
        """What is not 0 and should be."""
        left: dict[str, float] = {}
        for name, worker in (await self.fleet.listed()).items():
            for key in ("blocks_used", *BOOKINGS):
                left[f"{name} {key}"] = worker[key]
        for name in GAUGES:
            left[name] = await self.fleet.metric(name)
        return {name: value for name, value in left.items() if value}

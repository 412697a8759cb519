"""Many clients at once, each answer compared with that of the undisturbed run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from chaos.clients import LONGEST_S, Answer, Failed, Stream, send
from chaos.load import Request, endless, of_seed, stop_text


@dataclass(slots=True)
class Tally:
    """What became of the requests. A hung-up one is counted nowhere else."""

    requests: int = 0
    equal: int = 0
    hung_up: int = 0
    mismatched: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    hung: list[str] = field(default_factory=list[str])

    def add(self, other: Tally) -> None:
        """Count what another crowd saw, too."""
        self.requests += other.requests
        self.equal += other.equal
        self.hung_up += other.hung_up
        self.mismatched += other.mismatched
        self.failed += other.failed
        self.hung += other.hung

    @property
    def wrong(self) -> int:
        return len(self.mismatched) + len(self.failed) + len(self.hung)


class Served(Protocol):
    """What the clients know of a fleet."""

    port: int
    model: str


class Crowd:
    """The clients, and all streams in flight by the seed of their request."""

    def __init__(self, fleet: Served, requests: list[Request], seed: int) -> None:
        self.fleet = fleet
        self.requests = requests
        self.expected: dict[int, Answer] = {}
        self.active: dict[int, Stream] = {}
        self.tally = Tally()
        self._busy: set[int] = (
            set()
        )  # no request is asked twice at once: its seed names it on the workers
        self._order: Iterator[Request] = endless(requests, seed)
        self._rng = random.Random(f"crowd {seed}")
        self._watchers: list[tuple[Callable[[Stream], bool], asyncio.Future[Stream]]] = []
        self._awaited: dict[int, list[tuple[int, asyncio.Future[float]]]] = {}

    # --- the undisturbed run ---

    async def record(self, clients: int = 16) -> None:
        """Ask everything once, with nothing going wrong; requests of the kind `stop` get a stop string on the way."""
        found = await self._record([r for r in self.requests if r.kind == "stop"], clients)
        for i, request in enumerate(self.requests):
            if request.kind == "stop":
                text = stop_text(found[request.seed].choices[0][0])
                self.requests[i] = request if text is None else request.stopping_at(text)
        self.expected = await self._record(self.requests, clients)
        self._order = endless(self.requests, self._rng.randrange(1 << 30))

    def compare_with(self, answers: dict[int, Answer]) -> None:
        """Those of another undisturbed run must be the same; where there are none yet, these are they."""
        for request in self.requests:
            answer = self.expected[request.seed]
            before = answers.setdefault(request.seed, answer)
            if before != answer:
                told = f"{request.kind} {request.seed}, undisturbed: {difference(before, answer)}"
                self.tally.mismatched.append(told)

    async def _record(self, requests: list[Request], clients: int) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        left = iter(requests)

        async def ask() -> None:
            for request in left:
                stream = await send(self.fleet.port, request, self.fleet.model)
                async with asyncio.timeout(LONGEST_S):
                    await stream.ended
                answers[request.seed] = stream.answer()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(ask())
        return answers

    # --- the disturbed run ---

    async def serve(self, clients: int, stop: asyncio.Event) -> None:
        """Keep so many streams going until `stop`; return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._one_after_another(stop))

    async def _one_after_another(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            request = next(r for r in self._order if r.seed not in self._busy)
            self._busy.add(request.seed)
            await self.ask(request)
            self._busy.discard(request.seed)

    async def ask(self, request: Request) -> Stream | None:
        """One request to its end; its answer is counted."""
        self.tally.requests += 1
        try:
            stream = await self.open(request)
        except OSError as error:
            self.tally.failed.append(f"{request.kind} {request.seed}: cannot connect: {error}")
            return None
        await self.finish(stream)
        return stream

    async def open(self, request: Request) -> Stream:
        """Send a request; `finish` has to follow."""
        stream = await send(self.fleet.port, request, self.fleet.model, self._heard)
        self.active[request.seed] = stream
        return stream

    async def finish(self, stream: Stream) -> None:
        request = stream.request
        try:
            async with asyncio.timeout(LONGEST_S):
                await stream.ended
        except TimeoutError:
            self.tally.hung.append(
                f"{request.kind} {request.seed}: {stream.tokens} tokens after {LONGEST_S:g} s"
            )
            stream.hang_up(reset=True)
        else:
            self._compare(stream)
        finally:
            del self.active[request.seed]
            self._resolve(stream, over=True)

    def _compare(self, stream: Stream) -> None:
        request, tally = stream.request, self.tally
        if stream.hung_up:
            tally.hung_up += 1
            return
        name = f"{request.kind} {request.seed}"
        try:
            answer = stream.answer()
        except Failed as failed:
            tally.failed.append(f"{name}: {failed}")
            return
        expected = self.expected[request.seed]
        if answer == expected:
            tally.equal += 1
        else:
            tally.mismatched.append(f"{name}: {difference(expected, answer)}")

    # --- what faults wait for ---

    async def first(self, condition: Callable[[Stream], bool], timeout_s: float) -> Stream | None:
        """The first stream for which an event makes `condition` true; None if none does in time."""
        future: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        watcher = (condition, future)
        self._watchers.append(watcher)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            self._watchers.remove(watcher)

    def next_token(self, seed: int, after: int) -> asyncio.Future[float] | None:
        """When this choice has more than `after` tokens, or its end. Cancelled if it fails; None if nobody waits.

        Only of requests with one choice: the usage counts the tokens of all.
        """
        stream = self.active.get(of_seed(seed))
        if stream is None or stream.request.choices > 1 or stream.hung_up:
            return None
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(seed, []).append((after, future))
        return future

    def _heard(self, stream: Stream) -> None:
        for condition, future in self._watchers:
            if not future.done() and condition(stream):
                future.set_result(stream)
        if self._awaited:
            self._resolve(stream, over=False)

    def _resolve(self, stream: Stream, *, over: bool) -> None:
        waiting = self._awaited.pop(stream.request.seed, None)
        if waiting is None:
            return
        left: list[tuple[int, asyncio.Future[float]]] = []
        for after, future in waiting:
            if not over and stream.tokens <= after:
                left.append((after, future))
            elif over and not stream.done:
                future.cancel()
            elif not future.done():
                future.set_result(time.monotonic())
        if left:
            self._awaited[stream.request.seed] = left


def difference(expected: Answer, got: Answer) -> str:
    """Where two answers differ first, in words."""
    for i, (want, have) in enumerate(zip(expected.choices, got.choices, strict=True)):
        for name, a, b in zip(("text", "logprobs", "finish"), want, have, strict=True):
            if a != b:
                at = next(
                    (k for k, (x, y) in enumerate(zip(a or "", b or "", strict=False)) if x != y),
                    min(len(a or ""), len(b or "")),
                )
                start = max(at - 20, 0)
                return (
                    f"{name} of choice {i} from character {at} of {len(a or '')}: "
                    f"expected {(a or '')[start : at + 40]!r}, got {(b or '')[start : at + 40]!r}"
                )
    return f"usage: expected {expected.usage}, got {got.usage}"

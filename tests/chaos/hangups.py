"""Clients that hang up at each point of a request's life, and how long its blocks outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.clients import Stream
from chaos.crowd import Crowd
from chaos.fleet import ChaosError, Fleet, Worker
from chaos.load import CHUNK_TOKENS, FIRST_ID, LAST_ID, SEEDS_APART, Request

FIRST_SEED = 1 << 30  # above those of the crowd's requests
REACHED_WITHIN_S = 15.0
FREED_WITHIN_S = 30.0
ATTEMPTS = 5
QUEUED_WITHIN_S = 5.0
BURST = 512  # prompts: far more than the workers may have ahead

# Where a worker is held while the client goes.
HELD_AT = {
    "mid-prefill": "computing",
    "between chunks": "chunk",
    "before ticket": "before ticket",
    "during transfer": "segment",
    "between legs": "continue",
    "in the last step": "last step",
}
AFTER_EVENT: dict[str, Callable[[Stream], bool]] = {
    "first token": lambda stream: stream.tokens >= 1,
    "mid-decode": lambda stream: stream.tokens >= 6,
    "after the last token": lambda stream: stream.choices[0].finish is not None,
}


@dataclass(frozen=True, slots=True)
class HungUp:
    """What came of it: at which time, and how long until the last block was free (None: no worker had it)."""

    at_s: float
    freed_ms: float | None


class HangUps:
    """Asks its own requests and leaves them."""

    def __init__(self, fleet: Fleet, crowd: Crowd, seed: int) -> None:
        self.fleet = fleet
        self.crowd = crowd
        self.rng = random.Random(f"hang-ups {seed}")
        self._seeds = itertools.count(FIRST_SEED, SEEDS_APART)
        self._ended: dict[int, float] = {}
        fleet.listeners.append(self._heard)

    def _heard(self, _worker: Worker, event: dict[str, Any]) -> None:
        if event["event"] == "end" and event["seed"] >= FIRST_SEED:
            self._ended[event["seed"]] = event["at"]

    async def at(self, point: str) -> HungUp | None:
        """One hang-up at `point`; None if the point was not reached. Raises ChaosError for blocks that stay."""
        if point in HELD_AT:
            return await self._held(HELD_AT[point])
        if condition := AFTER_EVENT.get(point):
            return await self._after(condition)
        match point:
            case "queued":
                return await self._queued()
            case "tokenising":
                return await self._at_once(self._chat(400_000))
            case other:
                assert other == "before dispatch"
                return await self._at_once(self._request())

    # --- requests ---

    def _request(self, chunks: float = 2.5, **more: Any) -> Request:
        """A prompt of so many chunks that no cache has."""
        count = round(chunks * CHUNK_TOKENS)
        prompt = self.rng.choices(range(FIRST_ID, LAST_ID + 1), k=count)
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **more}
        return self._named("/v1/completions", body)

    def _chat(self, characters: int) -> Request:
        content = "".join(self.rng.choices("abcdefgh ", k=characters))
        messages = [{"role": "user", "content": content}]
        return self._named("/v1/chat/completions", {"messages": messages, "max_tokens": 8})

    def _named(self, path: str, body: dict[str, Any]) -> Request:
        seed = next(self._seeds)
        return Request(seed, "hang-up", path, {**body, "seed": seed})

    # --- points ---

    async def _held(self, point: str) -> HungUp | None:
        """A worker stops at the step, the client goes, the worker goes on."""
        for _ in range(
            ATTEMPTS
        ):  # one that is placed on a single worker comes to no step of a transfer
            if hung_up := await self._held_once(point):
                return hung_up
        return None

    async def _held_once(self, point: str) -> HungUp | None:
        request = self._request()
        workers = list(self.fleet.workers.values())
        armed = [await self.fleet.arm(w, point, "hold", seed=request.seed) for w in workers]
        stream = await self.crowd.open(request)
        try:
            futures: list[asyncio.Future[Any]] = [future for _, future in armed]
            await asyncio.wait(
                [*futures, stream.ended],
                timeout=REACHED_WITHIN_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            reached = any(future.done() for future in futures)
            at_s = self._leave(stream)
            await self.fleet.get("/health")  # the router had time to notice
        finally:
            for worker, (rule, _) in zip(workers, armed, strict=True):
                self.fleet.disarm(worker, rule)
        await self.crowd.finish(stream)
        hung_up = await self._freed(request, at_s)
        return hung_up if reached else None

    async def _after(self, condition: Callable[[Stream], bool]) -> HungUp | None:
        request = self._request()
        watching = asyncio.create_task(
            self.crowd.first(
                lambda s: s.request.seed == request.seed and condition(s), REACHED_WITHIN_S
            )
        )
        await asyncio.sleep(0)  # it has begun to watch
        stream = await self.crowd.open(request)
        reached = await watching
        hung_up = self._leave(stream)
        await self.crowd.finish(stream)
        freed = await self._freed(request, hung_up)
        return None if reached is None else freed

    async def _at_once(self, request: Request) -> HungUp:
        """The request is written, and the client is gone."""
        stream = await self.crowd.open(request)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        hung_up = self._leave(stream)
        await self.crowd.finish(stream)
        return await self._freed(request, hung_up)

    async def _queued(self) -> HungUp | None:
        """More prompts at once than the workers may have ahead, while none of them computes one."""
        workers = list(self.fleet.workers.values())
        armed = [await self.fleet.arm(worker, "computing", "hold") for worker in workers]
        requests = [self._request(12, priority=100) for _ in range(BURST)]
        before = await self._cancelled_in_queue()
        streams = [await self.crowd.open(request) for request in requests]
        with contextlib.suppress(ChaosError):
            await self.fleet.poll(self._queue, "", QUEUED_WITHIN_S)
        times = [self._leave(stream) for stream in streams]
        await self.fleet.get("/health")  # the router had time to notice
        for worker, (rule, _) in zip(workers, armed, strict=True):
            self.fleet.disarm(worker, rule)
        for stream in streams:
            await self.crowd.finish(stream)
        for request, at_s in zip(requests, times, strict=True):
            await self._freed(request, at_s)
        reached = await self._cancelled_in_queue() > before
        return HungUp(times[-1], None) if reached else None

    async def _queue(self) -> bool:
        return await self.fleet.metric("headrace_queue_requests") > 0

    async def _cancelled_in_queue(self) -> float:
        return await self.fleet.metric("headrace_cancels_total", '{stage="queue"}')

    def _leave(self, stream: Stream) -> float:
        stream.hang_up(reset=self.rng.random() < 0.5)
        return time.monotonic()

    async def _freed(self, request: Request, at_s: float) -> HungUp:
        await self.fleet.until(
            lambda: not self.fleet.holders(request.seed),
            lambda: f"{request.seed} is still held by {self._names(request)}",
            FREED_WITHIN_S,
        )
        ended_s = self._ended.pop(request.seed, None)
        return HungUp(at_s, None if ended_s is None else max(ended_s - at_s, 0.0) * 1e3)

    def _names(self, request: Request) -> list[str]:
        return [worker.name for worker in self.fleet.holders(request.seed)]

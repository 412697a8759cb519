"""A worker that draws placements by its word: it says that its steps take no time, and they are slow."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from attack.attack import Attack, Outcome, Scale
from attack.stack import START_S, Router, Stack, start_workers
from attack.strangers import dial, hear, say
from attack.wire import Reply, ask, get, send, tally
from headrace.wire.frames import Frame, Hello, Step, StepCost, Submit

MODEL = "raced"
LIAR = "liar0"
TRUE_MS = 40.0  # of its steps; those of the others take 20 ms
NOTHING = StepCost(fixed_ms=0.001, prefill_ms=0.0, context_ms=0.0, row_ms=0.0, kv_ms=0.0)
EVERY_S = 0.01  # a request


async def no_time_at_all(stack: Stack, scale: Scale) -> Outcome:
    """A model with two honest workers and one that is half as fast, and says that it is faster than any can be."""
    total = scale.of(1_000, 600)
    gate = Gate()
    async with opened(gate, stack) as by_gate:
        own = ["--model", MODEL]
        fleet = [
            start_workers(stack.programs, stack.router, None, name="honest", flags=own),
            start_workers(
                stack.programs, by_gate, None, count=1, step_ms=TRUE_MS, name="liar", flags=own
            ),
        ]
        try:
            await until_there(stack, 3)
            asked: list[asyncio.Task[Reply]] = []
            for number in range(total):
                body = {"model": MODEL, "prompt": f"{number}", "max_tokens": 8, "ignore_eos": True}
                asked.append(asyncio.create_task(ask(stack.router, "/v1/completions", body)))
                await asyncio.sleep(EVERY_S)
            replies = await asyncio.gather(*asked)
            liar = (await workers(stack)).get(LIAR, {})
        finally:
            for process in fleet:
                process.terminate()
                process.wait(10)
    told = f"{tally(replies)}; the liar got {gate.given}, doubted for {liar.get('speed_doubted')}"
    # some dozens before it is found out: of few requests no small part
    found_out = 2 * gate.given < total
    return Outcome(told, found_out and all(reply.status == "200" for reply in replies))


@dataclass(slots=True)
class Gate:
    """What becomes of the frames of a worker that is honest itself, and how many requests it is given."""

    given: int = 0

    def flatter(self, frame: Frame) -> Frame:
        match frame:
            case Hello():
                return dataclasses.replace(frame, step_prior=NOTHING)
            case Step():
                return dataclasses.replace(frame, ms=0.0)
            case _:
                return frame

    def count(self, frame: Frame) -> Frame:
        self.given += isinstance(frame, Submit)
        return frame


@contextlib.asynccontextmanager
async def opened(gate: Gate, stack: Stack) -> AsyncGenerator[Router]:
    """The router as it looks to a worker whose link goes through the gate."""

    links: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_reader, its_writer = await dial(stack)
        for one in (
            pass_on(reader, its_writer, gate.flatter),
            pass_on(its_reader, writer, gate.count),
        ):
            links.add(asyncio.create_task(one))

    path = stack.folder / "gate.sock"
    async with await asyncio.start_unix_server(accept, path):
        yield dataclasses.replace(stack.router, socket=f"unix:{path}")
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: Callable[[Frame], Frame]
) -> None:
    """Frames until either side hangs up."""
    try:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await say(writer, through(await hear(reader)))
    finally:
        writer.close()


async def until_there(stack: Stack, count: int) -> None:
    """Wait until so many workers of our model take work."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        found = [(one["model"], one["state"]) for one in (await workers(stack)).values()]
        if found.count((MODEL, "ready")) == count:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the workers did not come")


async def workers(stack: Stack) -> dict[str, dict[str, Any]]:
    """All that the router says of each."""
    reply = await send(stack.router, get(stack.router, "/workers"), 10)
    return {worker["id"]: worker for worker in json.loads(reply.body)["workers"]}


ATTACKS = [Attack(name="a worker whose steps take no time", run=no_time_at_all, most_mb=64)]

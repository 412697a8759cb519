"""Whoever should not: web pages, and processes that dial in as workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time

import numpy as np

from attack.attack import Attack, Outcome, Scale
from attack.stack import Stack, start_workers
from attack.wire import ask, get, send
from headrace.wire import codec
from headrace.wire.frames import (
    PROTOCOL,
    Blocks,
    Capacity,
    Fingerprints,
    Frame,
    Hello,
    Refuse,
    Snapshot,
    StoredRun,
    Welcome,
)

BLOCKS_A_FRAME = 100_000


async def web_page(stack: Stack, scale: Scale) -> Outcome:
    """What a page in somebody's browser can send: no type, a foreign origin, a name that resolves to us."""
    router = stack.router
    own = f"Host: {router.host}:{router.port}\r\n"
    plain = (
        "POST /workers/w0/drain HTTP/1.1\r\n{}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    )
    ways = {
        "untyped": own,
        "form": own + "Content-Type: text/plain\r\n",
        "cross-site": own + "Origin: http://evil.example\r\nContent-Type: application/json\r\n",
        "rebound": "Host: evil.example\r\nContent-Type: application/json\r\n",
    }
    replies = {
        name: await send(router, plain.format(head).encode(), 10) for name, head in ways.items()
    }
    told = ", ".join(f"{name} {reply.status}" for name, reply in replies.items())
    return Outcome(told, all(reply.status.startswith("4") for reply in replies.values()))


async def same_name(stack: Stack, scale: Scale) -> Outcome:
    """A stranger dials in under the names of both living workers."""
    before = await prompts_taken(stack)
    strangers = start_workers(
        stack.programs, stack.router, stack.doc, name="w", flags=["--model", stack.model]
    )
    try:
        await asyncio.sleep(3.0)
        after = await prompts_taken(stack)
    finally:
        strangers.terminate()
        strangers.wait(10)
    moved = after["resumed"] - before["resumed"]
    return Outcome(f"{moved:.0f} answers moved to the stranger", moved == 0)


async def prompts_taken(stack: Stack) -> dict[str, float]:
    """Answers that went on elsewhere."""
    text = (await send(stack.router, get(stack.router, "/metrics"), 10)).body.decode()
    found = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("headrace_resumes_total")
    ]
    return {"resumed": sum(found)}


async def silent_workers(stack: Stack, scale: Scale) -> Outcome:
    """256 connections to the worker port that say nothing; then a worker that wants to join."""
    silent = [await dial(stack) for _ in range(256)]
    began = time.monotonic()
    worker = start_workers(
        stack.programs, stack.router, None, name="late", flags=["--model", "late"]
    )
    try:
        while time.monotonic() - began < 30:
            if b'"late"' in (await send(stack.router, get(stack.router, "/v1/models"), 10)).body:
                break
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
    finally:
        worker.terminate()
        worker.wait(10)
        for _, writer in silent:
            writer.close()
    return Outcome(f"the worker served after {took:.1f} s", took < 5)


async def made_up_blocks(stack: Stack, scale: Scale) -> Outcome:
    """A stranger announces blocks without end, and models without end."""
    said: list[str] = []
    reader, writer = await dial(stack)
    welcome = await shake(reader, writer, hello("stranger", "made-up-0", blocks=1 << 26))
    said.append(type(welcome).__name__ if welcome else "closed")
    sent = await announce(writer, scale) if isinstance(welcome, Welcome) else 0
    others = [await dial(stack) for _ in range(300)]
    for number, (its_reader, its_writer) in enumerate(others):
        with contextlib.suppress(ConnectionError):
            await shake(its_reader, its_writer, hello(f"s{number}", f"made-up-{number}", blocks=16))
    for _, its_writer in [*others, (reader, writer)]:
        its_writer.close()
    worker = start_workers(
        stack.programs, stack.router, None, name="late", flags=["--model", "late"]
    )
    try:
        began = time.monotonic()
        fine = False
        body = {"model": "late", "prompt": "x", "max_tokens": 1}
        while time.monotonic() - began < 15 and not fine:
            fine = (await ask(stack.router, "/v1/completions", body)).status == "200"
            await asyncio.sleep(0.1)
    finally:
        worker.terminate()
        worker.wait(10)
    said.append(f"{sent / 1e6:.1f} M blocks sent")
    said.append("a new model serves" if fine else "a new model is kept out")
    return Outcome(", ".join(said), fine)


async def blocks_to_nobody(stack: Stack, scale: Scale) -> Outcome:
    """The same blocks to a program that only reads."""
    _, writer = await dial(stack)
    sent = await announce(writer, scale)
    writer.close()
    return Outcome(f"{sent / 1e6:.1f} M blocks sent", True)


async def announce(writer: asyncio.StreamWriter, scale: Scale) -> int:
    """An empty snapshot, and then blocks that nobody has. How many, as far as somebody takes them."""
    some = np.frombuffer(os.urandom(8 * BLOCKS_A_FRAME), dtype=np.uint64)
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        await say(writer, Snapshot(1, 0, b"", True))
        for number in range(1, scale.of(400, 20)):
            # other keys each time, by few instructions: what an attacker computes slows down all on this machine
            run = StoredRun(None, (some ^ np.uint64(number)).tobytes())
            await asyncio.wait_for(say(writer, Blocks(1, number, [run], b"", False, 0)), 10)
            sent += BLOCKS_A_FRAME
    return sent


def hello(name: str, model: str, *, blocks: int) -> Hello:
    """What a stranger says of itself."""
    return Hello(
        protocol=PROTOCOL,
        worker=name,
        epoch=1,
        role="both",
        model=model,
        fingerprints=Fingerprints("w", f"t-{model}", "c", "k", "blake3-chain-v2", 16),
        capacity=Capacity(blocks=blocks, sequences=64, batched_tokens=4096, waiting=64),
        context_tokens=4096,
        nonce=os.urandom(16),
        dtype="float32",
    )


async def dial(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(stack.router.socket.removeprefix("unix:"))


async def say(writer: asyncio.StreamWriter, frame: Frame) -> None:
    body = codec.encode(frame)
    writer.write(struct.pack("<I", len(body)) + body)
    await writer.drain()


async def hear(reader: asyncio.StreamReader) -> Frame:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    return codec.decode(await reader.readexactly(length))


async def shake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: Hello
) -> Welcome | Refuse | None:
    """The router's answer to a Hello; None if it hung up or says nothing."""
    await say(writer, first)
    try:
        async with asyncio.timeout(10):
            frame = await hear(reader)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return None
    return frame if isinstance(frame, Welcome | Refuse) else None


ATTACKS = [
    Attack(name="a web page drains a worker", run=web_page, most_mb=64),
    Attack(name="strangers under the names of living workers", run=same_name, most_mb=128),
    Attack(name="256 silent connections to the worker port", run=silent_workers, most_mb=64),
    Attack(
        name="a stranger announces 40 M blocks and 300 models",
        run=made_up_blocks,
        most_mb=640,
        slice_mb=320,  # two million blocks of up to 64 bytes, twice while the index grows
        control=blocks_to_nobody,
    ),
]

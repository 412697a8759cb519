"""What happens beside the load: workers that fail and come back, and clients that do not stay for their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

_KINDS = ("die", "freeze", "slow=4x", "gap", "forget=0.5", "drop-events=0.2", "duplicate-stores")


def faults(seed: int, seconds: float, workers: int, every_s: float) -> list[str]:
    """For `headrace mock --fault`: one worker at a time fails, for half of the time between two faults."""
    rng = random.Random(seed)
    plan: list[str] = []
    at = every_s
    while at + every_s / 2 < seconds:
        kind = rng.choice(_KINDS)
        plan.append(f"w{rng.randrange(workers)}:{kind}@{at:.0f}s-{at + every_s / 2:.0f}s")
        at += every_s
    return plan


def _request(path: str, body: bytes, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _json(path: str, **body: Any) -> bytes:
    return _request(path, json.dumps({"model": "mock"} | body).encode())


_CHAT = [{"role": "user", "content": "Hello"}]
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
# The whole answer is read, whatever it says.
_WHOLE: Sequence[bytes] = (
    _json("/v1/chat/completions", messages=_CHAT, max_tokens=2),
    _json("/v1/chat/completions", messages=_CHAT, max_tokens=2, n=3, stream=True),
    _json("/v1/responses", input="Hello", max_output_tokens=2),
    _json("/v1/messages", messages=_CHAT, max_tokens=2),
    _json("/v1/completions", prompt="a b c", max_tokens=2, echo=True, logprobs=2),
    _json("/v1/chat/completions", messages=_CHAT, response_format=_FORMAT, max_tokens=2),
    _json("/v1/chat/completions", messages="wrong"),
    _request("/v1/chat/completions", b'{"model": '),
    _json("/tokenize", prompt="Water flows down a hill"),
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
# The client leaves after some bytes of the answer.
_LEFT: Sequence[bytes] = (
    _json("/v1/chat/completions", messages=_CHAT, max_tokens=4000, stream=True),
    _json("/v1/completions", prompt=["a", "b"], max_tokens=4000, ignore_eos=True, stream=True),
    _json("/v1/responses", input="Hello", max_output_tokens=4000, stream=True),
    _json("/v1/chat/completions", messages=_CHAT, max_tokens=4000),
)


async def _whole(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.replace(b"\r\nHost:", b"\r\nConnection: close\r\nHost:", 1))
        await reader.read()
    finally:
        writer.transport.abort()


async def _leave(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        # in Python 3.11 `wait_for` may lose a cancellation, and the visits would never end
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.read(300)
    finally:
        writer.transport.abort()


async def _half(port: int, request: bytes) -> None:
    """A head or a body that never ends, until the client goes."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request[: len(request) * 2 // 3])
        await writer.drain()
    finally:
        writer.transport.abort()


Act = Callable[[int, bytes], Coroutine[Any, Any, None]]


async def _visits(port: int, rng: random.Random, done: list[int]) -> None:
    acts: Sequence[tuple[Act, Sequence[bytes]]] = (
        (_whole, _WHOLE),
        (_leave, _LEFT),
        (_half, _WHOLE),
    )
    while True:
        act, requests = rng.choice(acts)
        with contextlib.suppress(OSError):  # a router that has no room says so by closing
            await act(port, rng.choice(requests))
        done[0] += 1


@asynccontextmanager
async def visitors(port: int, seed: int, count: int) -> AsyncGenerator[list[int]]:
    """Clients that come and go, one request each time, until the block ends; the number of their visits."""
    done = [0]
    tasks = [
        asyncio.create_task(_visits(port, random.Random(seed + i), done)) for i in range(count)
    ]
    try:
        yield done
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [result for result in results if not isinstance(result, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"a visitor failed: {failed[0]!r}")

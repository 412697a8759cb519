"""A worker's HTTP endpoint beside a worker that is only said to be there, and clients that send what they like."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, replace
from typing import Any

from headrace.wire.frames import Load
from headrace.worker.endpoint.server import Endpoint
from headrace.worker.endpoint.start import listen
from headrace.worker.endpoint.totals import EngineTotals
from headrace.worker.endpoint.watched import WatchedWorker, WorkerReport

TIMEOUT_S = 20.0
REPORT = WorkerReport(
    worker="w",
    model="m",
    role="both",
    joined=1,
    draining=False,
    blocks=100,
    load=Load(blocks_used=25, blocks_cached=50, running=3, waiting=2, preemptions=4),
    totals=EngineTotals(),
)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    """As a program of this machine sends it, where no header says otherwise."""
    named = any(line.startswith("Host:") for line in headers)
    lines = [f"{method} {path} HTTP/1.1", *([] if named else ["Host: localhost"]), *headers]
    return "\r\n".join([*lines, "", ""]).encode()


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """As far as it is taken."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            async with asyncio.timeout(TIMEOUT_S):
                await self._writer.drain()

    async def rest(self) -> bytes:
        """All that comes until the other side hangs up."""
        parts: list[bytes] = []
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(TIMEOUT_S):
                while part := await self._reader.read(1 << 16):
                    parts.append(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        self._writer.transport.abort()


@dataclass(slots=True)
class HttpPort:
    """An endpoint, as others see it."""

    port: int

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def raw(self, data: bytes) -> bytes:
        client = await self.connect()
        await client.send(data)
        try:
            return await client.rest()
        finally:
            client.hang_up()

    async def get(self, path: str, *headers: str, method: str = "GET") -> HttpAnswer:
        return parsed(await self.raw(request(path, *headers, method=method)))


@dataclass(slots=True)
class WatchedScene(HttpPort):
    """An endpoint; `report` is what its worker says of itself."""

    watched: WatchedWorker
    report: WorkerReport = REPORT

    def now(self) -> WorkerReport:
        return self.report

    def change(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)


def parsed(data: bytes) -> HttpAnswer:
    head, _, body = data.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return HttpAnswer(int(first.split()[1]), {k.lower(): v for k, _, v in pairs}, body)


@contextlib.contextmanager
def endpoint() -> Generator[WatchedScene]:
    """Of a worker that does not serve yet."""
    watched = WatchedWorker()
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    opened = Endpoint(listener, watched)
    try:
        yield WatchedScene(port, watched)
    finally:
        opened.close()


@contextlib.asynccontextmanager
async def serving_endpoint() -> AsyncGenerator[WatchedScene]:
    """Of a worker that serves on the loop of the test."""
    with endpoint() as scene, scene.watched.serving(scene.now):
        yield scene

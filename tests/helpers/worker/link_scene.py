"""A worker's link and a router on a real socket that does what a test scripts, connection by connection."""

import asyncio
import dataclasses
import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import _core
from headrace.wire import codec
from headrace.wire.frames import PROTOCOL, Capacity, Fingerprints, Frame, Hello, Load, Step, Welcome
from headrace.wire.link import Link, LinkConfig

HELLO = Hello(
    PROTOCOL,
    "worker-0",
    1,
    "both",
    "model",
    Fingerprints("w", "t", "c", "kv", _core.HASH_SCHEME, 16),
    Capacity(1, 1, 1, 1),
    128,
)
WELCOME = Welcome(PROTOCOL, "router-0", 250, b"", b"", bytes(range(32)))
HEARTBEAT = Step(0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, Load(), [])
IN_TIME_S = 20.0


def packed(*messages: Frame) -> bytes:
    bodies = [codec.encode(message) for message in messages]
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


@dataclass
class Peer:
    """The router's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> Frame:
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return codec.decode(await self.reader.readexactly(size))

    async def hello(self) -> Hello:
        hello = await self.read()
        assert isinstance(hello, Hello)
        return hello

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def welcome(self, *more: Frame) -> Hello:
        hello = await self.hello()
        await self.write(packed(WELCOME, *more))
        return hello

    async def gone(self) -> None:
        """Returns when the worker hung up."""
        with suppress(ConnectionError):
            await self.reader.read()


@dataclass
class FakeRouter:
    """Connection number n is handled by script n, the last one again and again."""

    address: str = ""
    dials: int = 0
    failures: list[BaseException] = field(default_factory=list[BaseException])


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def router(
    *scripts: Script, unix: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[FakeRouter]:
    state = FakeRouter()
    tasks: set[asyncio.Task[Any]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        script = scripts[min(state.dials, len(scripts) - 1)]
        state.dials += 1
        try:
            await script(Peer(reader, writer))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            state.failures.append(error)
        finally:
            writer.close()
            tasks.discard(task)

    if unix is not None:
        server = await asyncio.start_unix_server(accept, str(unix), ssl=tls)
        state.address = f"unix:{unix}"
    else:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        state.address = f"localhost:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(IN_TIME_S):
            yield state
            await asyncio.gather(*tasks)  # every script ends when its worker hangs up
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not state.failures


def link_to(at: FakeRouter, **config: Any) -> Link:
    quick = LinkConfig(address=at.address, first_backoff_s=0.001, max_backoff_s=0.002)
    return Link(dataclasses.replace(quick, **config), lambda: HELLO, random.Random(1))


async def hold(peer: Peer) -> None:
    """Welcome the worker and wait until it hangs up."""
    await peer.welcome()
    await peer.gone()

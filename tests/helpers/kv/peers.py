"""Ends of a transfer connection that say what a test tells them to."""

from __future__ import annotations

import asyncio
import secrets
import socket
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Literal, TypeAlias

from headrace import _core
from headrace.kv_transfer.backends.base import VERSION, Limits, LinkBroken, layout_text
from headrace.kv_transfer.backends.memory import HostMemory
from headrace.kv_transfer.backends.shm import ShmExporter
from headrace.kv_transfer.peers.members import (
    NONCE_BYTES,
    PROOF_BYTES,
    Members,
    Transcript,
    pull_proof,
)
from headrace.kv_transfer.peers.messages import (
    Challenge,
    Data,
    KvHello,
    KvOpen,
    KvProve,
    KvWelcome,
    PullBlocks,
    Ready,
    Started,
)
from headrace.kv_transfer.peers.server import TransferServer
from headrace.kv_transfer.peers.stream import Stream
from headrace_kernels.ops import KvPool
from helpers.kv.pull_keys import PULL_KEY

LAYOUT = "test-1 layers_per_group=2"
PATIENT = Limits(heartbeat_s=20.0, dial_s=60.0, handshake_s=60.0, stranger_s=60.0)  # not passed
# Heartbeats are counted: where both ends are in one process they stand still together, and miss none.
QUICK = replace(PATIENT, heartbeat_s=0.05)
# Of one end, where the other one is a process that is stopped: longer than it stands still by itself.
NOTICING = replace(PATIENT, heartbeat_s=0.5)
HASTY = replace(QUICK, dial_s=0.5, handshake_s=0.8, stranger_s=0.8)  # for handshakes that never end
MEMBERS = Members([b"k" * 32])
NONCE = b"n" * NONCE_BYTES
Backend: TypeAlias = Literal["shm", "tcp"]
BACKENDS: tuple[Backend, ...] = ("shm", "tcp")


@asynccontextmanager
async def listening(
    backend: Backend, serve: Callable[[Stream], Awaitable[None]]
) -> AsyncGenerator[list[str]]:
    """Endpoints where each connection is given to `serve`, and closed after it."""
    loop = asyncio.get_running_loop()
    if backend == "shm":
        name = f"test-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        endpoint = f"shm:{name}"
    else:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        endpoint = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    listener.listen()
    listener.setblocking(False)

    async def handle(sock: socket.socket) -> None:
        stream = Stream(sock)
        try:
            with suppress(LinkBroken):
                await serve(stream)
        finally:
            stream.close("the test is done with it")

    async def accept() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                sock, _ = await loop.sock_accept(listener)
                tasks.create_task(handle(sock))

    accepting = asyncio.create_task(accept())
    try:
        yield [endpoint]
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listener.close()


@asynccontextmanager
async def serving_of(
    pool: KvPool, limits: Limits = QUICK, members: Members = MEMBERS
) -> AsyncGenerator[TransferServer]:
    """A source as it is."""
    server = TransferServer(pool, LAYOUT, members=members, limits=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


class SourceScript:
    """The steps of a source that behaves, one by one."""

    def __init__(self, stream: Stream, pool: KvPool, backend: Backend) -> None:
        self.stream = stream
        self.pool = pool
        self.backend = backend
        self.proof = bytes(PROOF_BYTES)

    async def challenge(self) -> Transcript:
        """Up to what the client has proved."""
        hello = await self.stream.receive()
        assert isinstance(hello, KvHello)
        await self.stream.send([Challenge(NONCE)])
        prove = await self.stream.receive()
        assert isinstance(prove, KvProve)
        transcript = Transcript(hello.nonce, NONCE, prove.ticket)
        assert isinstance(await self.stream.receive(), KvOpen)
        met = MEMBERS.answer(transcript, prove.proofs)
        self.proof = bytes(PROOF_BYTES) if met is None else met.proof
        return transcript

    async def welcome(self, about: bytes | None = None) -> None:
        await self.challenge()
        if self.backend == "shm":
            exporter = ShmExporter(self.pool)
            described, fds = exporter.describe()
            welcome = KvWelcome("shm", described if about is None else about, self.proof)
            await self.stream.send_with_fds(welcome, fds)
            exporter.close()
        else:
            await self.stream.send([KvWelcome("tcp", about or b"", self.proof)])

    async def pull(self) -> PullBlocks:
        pull = await self.receive(PullBlocks)
        assert isinstance(pull, PullBlocks)
        return pull

    async def receive(self, kind: type) -> object:
        """The next message of that kind."""
        while not isinstance(message := await self.stream.receive(), kind):
            pass
        return message

    async def start(self, pull: PullBlocks) -> None:
        """Places are block numbers."""
        await self.stream.send([Started(pull.pull, pull.places)])

    async def migration(self, pull: PullBlocks, group: int, *, crc_off_by: int = 0) -> None:
        blocks = array("I", pull.places)
        if self.backend == "shm":
            await self.stream.send([Ready(pull.pull, group, 0, len(blocks))])
            return
        parts = HostMemory(self.pool).outgoing(group, blocks)
        crc = _core.crc32(parts) ^ crc_off_by
        await self.stream.send([Data(pull.pull, group, 0, len(blocks), crc)], parts)


async def forever(stream: Stream) -> None:
    """Take everything and say nothing."""
    while True:
        await stream.receive()


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what it waits for has no event
            await asyncio.sleep(0)


@asynccontextmanager
async def connected(endpoints: list[str], backend: Backend) -> AsyncGenerator[Stream]:
    """A connection to a server, without a word."""
    stream = await _connect(endpoints, backend)
    try:
        yield stream
    finally:
        stream.close("the test is done with it")


async def _connect(endpoints: list[str], backend: Backend) -> Stream:
    rest = next(e for e in endpoints if e.startswith(f"{backend}:")).partition(":")[2]
    loop = asyncio.get_running_loop()
    if backend == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await loop.sock_connect(sock, f"\0{rest}")
    else:
        sock = socket.socket()
        sock.setblocking(False)
        host, port = rest.split(":")
        await loop.sock_connect(sock, (host, int(port)))
    return Stream(sock)


async def proven(
    stream: Stream, ticket: bytes, nonce: bytes = NONCE, members: Members = MEMBERS
) -> KvProve:
    """What a client says to the source's challenge, for which this waits."""
    return prove_of(await challenged(stream, ticket, nonce), members)


async def challenged(stream: Stream, ticket: bytes, nonce: bytes = NONCE) -> Transcript:
    """What a client's proofs are about."""
    await stream.send([KvHello(VERSION, nonce)])
    challenge = await stream.receive()
    assert isinstance(challenge, Challenge), challenge
    return Transcript(nonce, challenge.nonce, ticket)


def prove_of(about: Transcript, members: Members = MEMBERS, pull_key: bytes = PULL_KEY) -> KvProve:
    proofs = members.puller_proofs(about)
    return KvProve(about.ticket, proofs, pull_proof(pull_key, b"".join(proofs), about.ticket))


async def greet(stream: Stream, pool: KvPool, backend: Backend, ticket: bytes) -> bytes:
    """A client's handshake, and what the proofs of its pulls are about. What came with the Welcome is thrown away."""
    return await let_in(stream, pool, backend, await challenged(stream, ticket))


async def let_in(stream: Stream, pool: KvPool, backend: Backend, about: Transcript) -> bytes:
    """The same from the challenge on."""
    import os

    await stream.send([prove_of(about), KvOpen(layout_text(LAYOUT, pool), [backend])])
    welcome, fds = await stream.receive_with_fds(1 << 16)
    for fd in fds:
        os.close(fd)
    assert isinstance(welcome, KvWelcome), welcome
    shared = MEMBERS.shared(about, welcome.proof)
    assert shared is not None
    return shared


def pull_of(
    shared: bytes,
    ticket: bytes,
    places: list[int],
    number: int = 0,
    *,
    pull_key: bytes = PULL_KEY,
) -> PullBlocks:
    """What a client says for a pull after its handshake."""
    proof = pull_proof(pull_key, shared, ticket)
    return PullBlocks(number, ticket, proof, array("I", places).tobytes())

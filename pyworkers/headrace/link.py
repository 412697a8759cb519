"""The worker's side of its link to one router: dial, shake hands, frames in and out, dial again.

    link = Link(config, hello)
    while True:
        session = await link.connect()  # dials until a router takes us; raises Refused if it never will
        try:
            async with session, asyncio.TaskGroup() as tasks:
                tasks.create_task(receive(session))  # `async for frame in session`
                tasks.create_task(generate(session))  # `await session.send(step, freed)`
        except* LinkLost:
            continue

A `Session` is one connection whose handshake is done. It ends with LinkLost, from receiving and from
sending alike. The router forgets a worker's requests and blocks with its link, so what runs for a
lost session is to be cancelled, and each new session begins with a Snapshot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import math
import random
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from headrace import _core, codec
from headrace.errors import (
    AlreadyJoined,
    FrameTooLong,
    HeldOff,
    LinkError,
    LinkLost,
    MalformedFrame,
    Refused,
    RouterNotTrusted,
    WireError,
)
from headrace.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromRouter,
    FromWorker,
    Hello,
    Prove,
    Refuse,
    Welcome,
)

log = logging.getLogger(__name__)

HEADER_BYTES = 4
# Before the handshake a router may be anybody: it gets no more of our memory than this.
HANDSHAKE_FRAME_BYTES = 64 << 10
HASH_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How to reach one router. All bounds are for one connection; none of them was tuned."""

    address: str  # HOST:PORT, [IPV6]:PORT or unix:PATH
    secret: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    tls_name: str | None = None  # whom the certificate must name, where that is not the host
    handshake_timeout_s: float = 10.0  # from the dial to the Welcome
    write_timeout_s: float = 10.0  # the router took nothing of what waits for it
    dead_after_s: float = 10.0  # TCP: nothing of what was sent is acknowledged
    max_unsent_bytes: int = 8 << 20  # beyond this, `send` waits
    max_unread_frames: int = 1024  # beyond this, the socket is not read
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


def tls_context(ca_file: Path | None = None) -> ssl.SSLContext:
    """Trusts what the CAs in `ca_file` (PEM) signed, or what the system trusts."""
    return ssl.create_default_context(cafile=ca_file)


def parse_address(text: str) -> Path | tuple[str, int]:
    """A Unix socket's path, or host and port. Raises ValueError if it is neither."""
    scheme, _, path = text.partition("unix:")
    if not scheme and path:
        return Path(path)
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: where it ends is a guess
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"{text!r} is no address; write HOST:PORT, [IPV6]:PORT or unix:PATH")
    return host, int(port)


class Backoff:
    """Growing delays. Half of each is random, so that workers of a lost router do not dial in step."""

    def __init__(self, first_s: float, max_s: float, rng: random.Random) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._rng = rng
        self._next_s = first_s

    def next(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s


class Link:
    """The way to one router. `hello` is called for each dial; the link fills in the nonce."""

    def __init__(
        self,
        config: LinkConfig,
        hello: Callable[[], Hello],
        rng: random.Random | None = None,
        joined: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.config = config
        self._joined = joined  # whether the router of this name has a link to us
        self._address = parse_address(config.address)
        self._hello = hello
        self._backoff = Backoff(
            config.first_backoff_s,
            config.max_backoff_s,
            rng or random.Random(),
        )
        self._opened_at: float | None = None

    async def connect(self) -> Session:
        """Dial until a handshake succeeds. A session that lived for a while resets the delay.

        Raises Refused or RouterNotTrusted where dialling again cannot help, HeldOff where it can later, AlreadyJoined
        where there is a link to this router.
        """
        loop = asyncio.get_running_loop()
        if self._opened_at is not None and (
            loop.time() - self._opened_at > self.config.max_backoff_s
        ):
            self._backoff.reset()
        while True:
            try:
                session = await self._open()
            except (OSError, LinkLost, WireError) as error:
                delay_s = self._backoff.next()
                reason = str(error) or type(error).__name__
                log.warning(
                    "router %s: %s; dialling again in %.1f s", self.config.address, reason, delay_s
                )
                await asyncio.sleep(delay_s)
            else:
                self._opened_at = loop.time()
                log.info("joined router %s at %s", session.router, self.config.address)
                return session

    async def _open(self) -> Session:
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self.config.handshake_timeout_s):
                connection = await self._dial()
                return await self._shake_hands(connection)
        except BaseException as error:
            if connection is not None:
                connection.abort("the handshake failed")
            if isinstance(error, TimeoutError) and not str(error):
                limit_s = self.config.handshake_timeout_s
                raise LinkLost(f"no answer to our Hello within {limit_s:g} s") from None
            raise

    async def _dial(self) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = self.config.tls

        def make() -> _Connection:
            return _Connection(self.config)

        if isinstance(self._address, Path):
            name = "localhost" if tls else None
            _, connection = await loop.create_unix_connection(
                make, str(self._address), ssl=tls, server_hostname=name
            )
        else:
            host, port = self._address
            name = (self.config.tls_name or host) if tls else None
            _, connection = await loop.create_connection(
                make, host, port, ssl=tls, server_hostname=name
            )
        return connection

    async def _shake_hands(self, connection: _Connection) -> Session:
        nonce = secrets.token_bytes(16)
        connection.write(_pack(dataclasses.replace(self._hello(), nonce=nonce)))
        answer = await connection.receive()
        if isinstance(answer, Refuse):
            raise _refused(answer)
        if not isinstance(answer, Welcome):
            raise MalformedFrame("frame", "welcome or refuse", type(answer).__name__.lower())
        if answer.protocol != PROTOCOL:
            raise Refused(
                "protocol",
                expected=str(answer.protocol),
                got=str(PROTOCOL),
                message="router and worker must be of the same release",
            )
        if self._joined(answer.router):  # to be taken twice would cost the link that works
            raise AlreadyJoined(answer.router)
        hash_key = _check_router(answer, nonce, self.config.secret)
        if answer.challenge:
            assert self.config.secret is not None  # _check_router saw to it
            secret = self.config.secret.encode()
            connection.write(_pack(Prove(_core.auth_proof(secret, "worker", answer.challenge))))
        connection.trust()
        return Session(connection, answer, hash_key)


def _check_router(welcome: Welcome, nonce: bytes, secret: str | None) -> bytes:
    """The key of the block hash, if the router knows the secret that we know (or both know none)."""
    if secret is None:
        if welcome.challenge:
            raise RouterNotTrusted("the router wants a secret and this worker has none")
        if len(welcome.hash_key) != HASH_KEY_BYTES:
            raise MalformedFrame("welcome.hash_key", "32 bytes", str(len(welcome.hash_key)))
        return welcome.hash_key
    if not welcome.challenge:
        raise RouterNotTrusted("this worker has a secret and the router wants none")
    proof = _core.auth_proof(secret.encode(), "router", nonce)
    if not hmac.compare_digest(proof, welcome.proof):
        raise RouterNotTrusted("the router does not know the secret of this worker")
    return _core.derive_hash_key(secret.encode())


class Session:
    """One connection to a router that took us. Several tasks may send, one receives."""

    def __init__(self, connection: _Connection, welcome: Welcome, hash_key: bytes) -> None:
        self._connection = connection
        self.welcome = welcome
        self.router = welcome.router
        self.heartbeat_s = welcome.heartbeat_ms / 1000  # a Step goes out at least this often
        self.hash_key = hash_key  # for _core.hash_blocks

    async def receive(self) -> FromRouter:
        """The next frame. Raises LinkLost once no more comes, Refused if the router sends us away.

        A cancelled call loses no frame.
        """
        return _wanted(await self._connection.receive())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FromRouter:
        return await self.receive()

    async def send(self, *messages: FromWorker) -> None:
        """Write all of `messages` at once, after waiting for room.

        Returns when they are on their way, not when they arrived. Raises LinkLost when the link is gone, WireError for
        a message that is none (nothing was sent then). A cancelled call sent all or nothing.
        """
        data = b"".join([_pack(message) for message in messages])
        await self._connection.room()
        self._connection.write(data)

    async def close(self) -> None:
        """Send what is still unsent and hang up; bounded by the write time-out."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        else:
            self._connection.abort("this side gave up")


def _pack(message: FromWorker) -> bytes:
    body = codec.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def _wanted(frame: FromRouter) -> FromRouter:
    if isinstance(frame, Refuse):
        raise _refused(frame)
    return frame


def _refused(frame: Refuse) -> LinkError:
    """The two refusals that are none for good have names of their own: see `Refuse` in the schema of frames."""
    if frame.field == "circuit":
        return HeldOff(_seconds(frame.expected), frame.message)
    if frame.field == "link":
        return AlreadyJoined(frame.expected)
    return Refused(frame.field, frame.expected, frame.got, frame.message)


def _seconds(text: str) -> float:
    """Of a router that may send anything."""
    try:
        seconds = float(text)
    except ValueError:
        return 1.0
    return seconds if 0.0 <= seconds < math.inf else 1.0


class _Connection(asyncio.Protocol):
    """The bytes of a session. Holds at most one unfinished frame and `max_unread_frames` finished ones."""

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None  # the reason
        self._cause: Exception | None = None
        self._gone = asyncio.Event()
        # incoming
        self._buffer = bytearray()
        self._inbox: deque[FromRouter] = deque()
        self._arrived = asyncio.Event()  # the inbox has a frame, or the link is lost
        self._max_frame_bytes = HANDSHAKE_FRAME_BYTES
        self._max_unread = 1
        self._trusted = False
        self._reading = True
        # outgoing
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._stall: asyncio.TimerHandle | None = None

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._config.max_unsent_bytes)
        _tune(transport.get_extra_info("socket"), self._config.dead_after_s)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._parse()

    def eof_received(self) -> None:
        inside = " inside a frame" if self._buffer and self._reading else ""
        self._lose(f"the router closed the link{inside}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # aborting it now would end it twice
        self._lose(f"the link broke: {exc}" if exc else "the link was closed")
        self._gone.set()

    def pause_writing(self) -> None:
        self._has_room.clear()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._has_room.set()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- called by the session ---

    def trust(self) -> None:
        """The handshake is done: frames of any kind, and many of them, may come."""
        self._trusted = True
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._max_unread = self._config.max_unread_frames
        self._parse()

    async def receive(self) -> FromRouter:
        while not self._inbox:
            self._check()
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._inbox.popleft()
        self._go_on_reading()
        return frame

    async def room(self) -> None:
        while self._lost is None and not self._has_room.is_set():
            await self._has_room.wait()

    def write(self, data: bytes) -> None:
        self._check()
        assert self._transport is not None
        self._transport.write(data)

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()  # sends what it holds first
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await self._gone.wait()
        except TimeoutError:
            self.abort("the router took nothing more")

    def abort(self, reason: str) -> None:
        self._lose(reason)

    # --- inside ---

    def _check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self._lost) from self._cause

    def _parse(self) -> None:
        """Turn bytes into frames until they run out or the inbox is full; then stop reading the socket."""
        start = 0
        try:
            while len(self._inbox) < self._max_unread:
                body = start + HEADER_BYTES
                if len(self._buffer) < body:
                    break
                size = int.from_bytes(self._buffer[start:body], "little")
                if size > self._max_frame_bytes:
                    raise FrameTooLong(size, self._max_frame_bytes)
                if len(self._buffer) < body + size:
                    break
                frame = codec.decode(bytes(self._buffer[body : body + size]))
                if not isinstance(frame, FromRouter):
                    raise MalformedFrame("frame", "one of a router", type(frame).__name__)
                self._inbox.append(frame)
                start = body + size
        except WireError as error:
            self._lose(f"the router sent garbage: {error}", error)
        del self._buffer[:start]
        full = len(self._inbox) >= self._max_unread
        if self._inbox:
            self._arrived.set()
        if full == self._reading and self._lost is None:
            assert self._transport is not None
            self._reading = not full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _go_on_reading(self) -> None:
        if self._trusted and not self._reading and 2 * len(self._inbox) <= self._max_unread:
            self._parse()

    def _watch_stall(self) -> None:
        """While the router is slow: lose it if it took nothing at all since the last look."""
        assert self._transport is not None
        before = self._transport.get_write_buffer_size()

        def look() -> None:
            assert self._transport is not None
            if self._transport.get_write_buffer_size() < before:
                self._watch_stall()
            else:
                self._lose(f"the router took nothing for {self._config.write_timeout_s:g} s")

        self._stall = self._loop.call_later(self._config.write_timeout_s, look)

    def _lose(self, reason: str, cause: Exception | None = None) -> None:
        """End the link; whoever waits hears of it. The first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        self._cause = cause
        if self._stall is not None:
            self._stall.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._arrived.set()
        self._has_room.set()


def _tune(sock: Any, dead_after_s: float) -> None:
    """TCP only: send at once, and notice a peer that vanished without a word."""
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: also while heartbeats go out
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))

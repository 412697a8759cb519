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
import random
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace import _core
from headrace.errors import (
    AlreadyJoined,
    HeldOff,
    LinkClosed,
    LinkError,
    LinkLost,
    MalformedFrame,
    Refused,
    RouterNotTrusted,
    WireError,
)
from headrace.wire import codec
from headrace.wire.connection import HEADER_BYTES, Connection
from headrace.wire.frames import (
    PROTOCOL,
    FromRouter,
    FromWorker,
    Hello,
    OtherVersion,
    Prove,
    Refuse,
    RefuseReason,
    Welcome,
)

log = logging.getLogger(__name__)

HASH_KEY_BYTES = 32
# Dials after the end of a link, the first 0.4 s or more, that may fail without a warning: a router is started again, or
# this worker is about to be told to end as well
QUIET_DIALS = 3


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
    max_unread_frames: int = 1024  # beyond this, or the next, the socket is not read
    max_unread_bytes: int = 64 << 20  # as the longest frame
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


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
    """The way to one router. `hello` is called for each dial.

    The link fills in the nonce and, where a transfer endpoint listens on all addresses, the one that it dials from.
    """

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
        quiet = 0 if self._opened_at is None else QUIET_DIALS
        while True:
            try:
                session = await self._open()
            except (OSError, LinkLost, WireError) as error:
                delay_s = self._backoff.next()
                reason = str(error) or type(error).__name__
                log.log(
                    logging.INFO if quiet > 0 else logging.WARNING,
                    "router %s: %s; dialling again in %.1f s",
                    self.config.address,
                    reason,
                    delay_s,
                )
                quiet -= 1
                await asyncio.sleep(delay_s)
            else:
                self._opened_at = loop.time()
                log.info("joined router %s at %s", session.router, self.config.address)
                return session

    async def _open(self) -> Session:
        connection: Connection | None = None
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

    async def _dial(self) -> Connection:
        loop = asyncio.get_running_loop()
        tls = self.config.tls

        def make() -> Connection:
            return Connection(self.config)

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

    async def _shake_hands(self, connection: Connection) -> Session:
        nonce = secrets.token_bytes(16)
        hello = self._hello()
        transfer = [reachable(endpoint, connection.local_host) for endpoint in hello.transfer]
        connection.write(_pack(dataclasses.replace(hello, nonce=nonce, transfer=transfer)))
        try:
            answer = await connection.receive()
        except LinkClosed:
            raise LinkClosed(
                "the router hung up instead of answering our Hello; where that goes on, the router may be of a release "
                f"that does not speak version {PROTOCOL} of the protocol"
            ) from None
        if isinstance(answer, Refuse | OtherVersion):
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
        if answer.heartbeat_ms == 0:  # heartbeats without a pause
            raise MalformedFrame("welcome.heartbeat_ms", "at least 1", "0")
        if self._joined(answer.router):  # to be taken twice would cost the link that works
            raise AlreadyJoined(answer.router)
        hash_key = _check_router(answer, nonce, self.config.secret)
        if answer.challenge:
            assert self.config.secret is not None  # _check_router saw to it
            secret = self.config.secret.encode()
            connection.write(_pack(Prove(_core.auth_proof(secret, "worker", answer.challenge))))
        connection.trust()
        return Session(connection, answer, hash_key)


def reachable(endpoint: str, host: str) -> str:
    """`scheme:address:port` with `host` for an address that means all of a machine's."""
    scheme, _, rest = endpoint.partition(":")
    listening, _, port = rest.rpartition(":")
    if listening not in {"0.0.0.0", "[::]"}:
        return endpoint
    return f"{scheme}:[{host}]:{port}" if ":" in host else f"{scheme}:{host}:{port}"


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

    def __init__(self, connection: Connection, welcome: Welcome, hash_key: bytes) -> None:
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
    if isinstance(frame, Refuse | OtherVersion):
        raise _refused(frame)
    return frame


def _refused(frame: Refuse | OtherVersion) -> LinkError:
    """The refusals that are none for good have names of their own."""
    if isinstance(frame, Refuse):
        if frame.retry_after_ms is not None:
            return HeldOff(frame.retry_after_ms / 1000, frame.message)
        if frame.reason is RefuseReason.ALREADY_JOINED:
            return AlreadyJoined(frame.router)
    return Refused(frame.field, frame.expected, frame.got, frame.message)

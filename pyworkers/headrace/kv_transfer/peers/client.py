"""The puller's end: finds the best way to each source, keeps a connection to it, pulls over it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from headrace.kv_transfer.backends.base import (
    TICKET_BYTES,
    VERSION,
    BoundTicket,
    Limits,
    LinkBroken,
    Pulled,
    TransferError,
    layout_text,
)
from headrace.kv_transfer.backends.endpoints import (
    SourceAddress,
    able_backends,
    addresses,
    open_mover,
)
from headrace.kv_transfer.backends.memory import open_memory, segment_bytes
from headrace.kv_transfer.backends.tcp import Receiver
from headrace.kv_transfer.peers.client_link import ClientLink
from headrace.kv_transfer.peers.members import NONCE_BYTES, Members, Transcript, pull_proof
from headrace.kv_transfer.peers.messages import (
    MAX_HANDSHAKE_BYTES,
    MAX_STRANGER_BYTES,
    Challenge,
    KvHello,
    KvOpen,
    KvProve,
    KvRefuse,
    KvRefuseReason,
    KvWelcome,
)
from headrace.kv_transfer.peers.server import peer_credentials
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import PULL_KEY_BYTES, TransferBackend, TransferFailure

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool

log = logging.getLogger(__name__)

MAX_SOURCES: Final = 256  # connections; beyond, idle ones are given up first
BACKLOG_PAUSE_S: Final = (
    0.01  # before a source on this host is tried again that has yet to accept others
)


class TransferClient:
    """Pulls blocks into `pool` from other workers. All methods are for the event loop's thread."""

    def __init__(
        self,
        pool: KvPool,
        layout: str,
        *,
        members: Members,
        backends: Sequence[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._pool = pool
        self._layout = layout_text(layout, pool)
        self._members = members
        self._able = able_backends(pool, backends)
        self._limits = limits or Limits()
        self._segment_bytes = segment_bytes(pool)
        # One copies as fast as the memory goes; a second would take a core from the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        self._links: dict[tuple[str, ...], asyncio.Task[ClientLink]] = {}
        self._running: dict[asyncio.Task[None], ClientLink] = {}
        self._closed = False

    async def pull(
        self,
        endpoints: Sequence[str],
        ticket: BoundTicket,
        wanted: Sequence[tuple[int, int]],
        *,
        timeout_s: float,
    ) -> Pulled:
        """Pull `wanted`, each a place at the source and a block of ours, from the worker with these endpoints.

        Raises TransferError. When this returns, raises or is cancelled, nothing writes to the pool any more.
        """
        if len(ticket.ticket) != TICKET_BYTES:
            text = f"a ticket of {len(ticket.ticket)} bytes"
            raise TransferError(TransferFailure.REFUSED, text)
        assert len(ticket.pull_key) == PULL_KEY_BYTES
        assert max((block for _, block in wanted), default=0) < self._pool.num_blocks
        backend: TransferBackend | None = None
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._link(tuple(endpoints), ticket)
                while not link.usable:  # it ended while we waited for our turn
                    link = await self._link(tuple(endpoints), ticket)
                backend = link.backend
                return await link.pull(ticket, wanted)
        except TimeoutError:
            raise TransferError(
                TransferFailure.TIMEOUT, f"not done within {timeout_s:g} s", backend
            ) from None

    async def close(self) -> None:
        """Give up everything; pulls in flight raise TransferError cancelled."""
        self._closed = True
        for task in self._links.values():
            task.cancel()
        for link in self._running.values():
            link.hang_up("this worker closes its transfers", TransferFailure.CANCELLED)
        await asyncio.gather(*self._links.values(), *self._running, return_exceptions=True)
        self._links.clear()
        self._thread.shutdown()

    # --- connections ---

    async def _link(self, endpoints: tuple[str, ...], ticket: BoundTicket) -> ClientLink:
        """The connection to a source, dialled by whoever needs it first."""
        while True:
            try:
                return await self._shared_link(endpoints, ticket)
            except TicketRefused as refused:
                if refused.ticket == ticket:
                    raise
                # another pull's: it dialled for us too, and ours may be good

    async def _shared_link(self, endpoints: tuple[str, ...], ticket: BoundTicket) -> ClientLink:
        if self._closed:
            raise TransferError(TransferFailure.CANCELLED, "this worker closes its transfers")
        dialling = self._links.get(endpoints)
        if dialling is not None and dialling.done() and not _alive(dialling):
            dialling = None
        if dialling is None:
            self._make_room()
            dialling = asyncio.ensure_future(self._dial(endpoints, ticket))
            # whoever waited for it may be gone by then
            dialling.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._links[endpoints] = dialling
        try:
            return await asyncio.shield(dialling)
        except asyncio.CancelledError:
            if dialling.cancelled():  # by `close`
                raise TransferError(
                    TransferFailure.CANCELLED, "this worker closes its transfers"
                ) from None
            raise

    def _make_room(self) -> None:
        for endpoints, dialling in list(self._links.items()):
            if not dialling.done():
                continue
            if not _alive(dialling):
                del self._links[endpoints]
            elif len(self._links) >= MAX_SOURCES and dialling.result().idle_since_s is not None:
                dialling.result().hang_up("room for another source is needed")
                del self._links[endpoints]
        if len(self._links) >= MAX_SOURCES:
            raise TransferError(TransferFailure.NO_ROOM, f"{MAX_SOURCES} sources are pulled from")

    async def _dial(self, endpoints: tuple[str, ...], ticket: BoundTicket) -> ClientLink:
        """The first address that answers and has a back-end in common with us. Raises TransferError."""
        reasons: list[str] = []
        for address in addresses(endpoints, self._able):
            sock = None
            try:
                async with asyncio.timeout(self._limits.dial_s):
                    sock = await _connect(address)
                async with asyncio.timeout(self._limits.handshake_s):
                    return await self._shake_hands(sock, address, ticket)
            except TimeoutError:
                reasons.append(f"{address}: no answer")
            except (OSError, LinkBroken) as error:
                reasons.append(f"{address}: {error}")
            log.info("transfer: %s", reasons[-1])
        if not reasons:
            raise TransferError(
                TransferFailure.REFUSED, f"no back-end in common: {', '.join(endpoints)}"
            )
        raise TransferError(TransferFailure.LOST, "; ".join(reasons))

    async def _shake_hands(
        self, sock: socket.socket, address: SourceAddress, ticket: BoundTicket
    ) -> ClientLink:
        stream = Stream(sock)
        try:
            if sock.family == socket.AF_UNIX and (user := peer_credentials(sock)[1]) != os.getuid():
                raise LinkBroken(f"belongs to user {user}")
            transcript = await self._meet(stream, ticket)
            proofs = self._members.puller_proofs(transcript)
            proof = pull_proof(ticket.pull_key, b"".join(proofs), ticket.ticket)
            prove = KvProve(ticket.ticket, proofs, proof)
            await stream.send([prove, KvOpen(self._layout, address.backends)])
            welcome, fds = await stream.receive_with_fds(MAX_HANDSHAKE_BYTES)
            try:
                if not isinstance(welcome, KvWelcome):
                    raise _not_let_in(welcome, ticket)
                shared = self._members.shared(transcript, welcome.proof)
                if shared is None:
                    raise LinkBroken("is no worker of our routers")
                return self._welcomed(stream, welcome, fds, address, shared)
            finally:
                for fd in fds:
                    os.close(fd)
        except BaseException:
            stream.close("the handshake failed")
            raise

    async def _meet(self, stream: Stream, ticket: BoundTicket) -> Transcript:
        """Exchange nonces, with which each side proves that it knows the secret."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await stream.send([KvHello(VERSION, nonce)])
        challenge = await stream.receive(MAX_STRANGER_BYTES)
        if not isinstance(challenge, Challenge):
            raise _not_let_in(challenge, ticket)
        return Transcript(nonce, challenge.nonce, ticket.ticket)

    def _welcomed(
        self,
        stream: Stream,
        welcome: KvWelcome,
        fds: list[int],
        address: SourceAddress,
        shared: bytes,
    ) -> ClientLink:
        if welcome.backend not in address.backends:
            raise LinkBroken(f"a welcome to {welcome.backend:.200}")
        mover = open_mover(welcome.backend, self._pool, welcome.about, fds, self._thread)
        moving = mover or Receiver(stream, open_memory(self._pool), self._segment_bytes)
        link = ClientLink(
            stream,
            TransferBackend(welcome.backend),  # one of those that we named
            moving,
            shared=shared,
            segment_bytes=self._segment_bytes,
            limits=self._limits,
        )
        task = asyncio.ensure_future(link.run())
        self._running[task] = link
        task.add_done_callback(self._ended)
        log.info("transfer: pulling from %s by %s", address, welcome.backend)
        return link

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("transfer: a connection failed", exc_info=error)


class TicketRefused(TransferError):
    """The source does not let a client in for this ticket, or by this key; for another one it may."""

    def __init__(self, kind: TransferFailure, message: str, ticket: BoundTicket) -> None:
        super().__init__(kind, message)
        self.ticket = ticket


def _not_let_in(answer: object, ticket: BoundTicket) -> Exception:
    if not isinstance(answer, KvRefuse):
        return LinkBroken(f"no welcome, but {answer!r:.200}")
    if answer.why is not None:
        return TicketRefused(answer.why, answer.yours, ticket)
    text = f"{answer.reason} is {answer.yours!r} here and {answer.ours!r} at the source"
    if answer.reason is KvRefuseReason.LAYOUT:
        return TransferError(TransferFailure.LAYOUT, text)
    if answer.reason is KvRefuseReason.VERSION:
        return TransferError(TransferFailure.REFUSED, text)
    return LinkBroken(f"refused: {text}")  # another address may do


def _alive(dialling: asyncio.Task[ClientLink]) -> bool:
    return not dialling.cancelled() and dialling.exception() is None and dialling.result().usable


async def _connect(address: SourceAddress) -> socket.socket:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    if isinstance(address.target, str):
        return await _connected(socket.AF_UNIX, "\0" + address.target)
    host, port = address.target
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{host} has no address")
    for family, _, _, _, target in found:
        try:
            return await _connected(family, target)
        except OSError as error:
            failure = error
    raise failure


async def _connected(family: int, target: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family == socket.AF_UNIX:
            await _connect_local(sock, target)
        else:
            await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_local(sock: socket.socket, target: str) -> None:
    """Until there is room where the source's connections wait for it. asyncio would take that for a connection."""
    while True:
        try:
            sock.connect(target)
        except BlockingIOError:
            await asyncio.sleep(BACKLOG_PAUSE_S)
        else:
            return

"""The bytes of one link: a socket with bounds on what waits in it, whole frames in and out."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from headrace.errors import FrameTooLong, LinkClosed, LinkLost, MalformedFrame, WireError
from headrace.wire import codec
from headrace.wire.frames import MAX_FRAME_BYTES, FromRouter

if TYPE_CHECKING:
    from headrace.wire.link import LinkConfig

log = logging.getLogger(__name__)

HEADER_BYTES = 4
# Before the handshake a router may be anybody: it gets no more of our memory than this.
HANDSHAKE_FRAME_BYTES = 64 << 10


class Connection(asyncio.Protocol):
    """The bytes of a session. Holds at most one unfinished frame, and `max_unread_frames` finished ones; fewer, if they
    have `max_unread_bytes`.
    """

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None  # the reason
        self._cause: Exception | None = None
        self._kind = LinkLost
        self._gone = asyncio.Event()
        # incoming
        self._buffer = bytearray()
        self._inbox: deque[tuple[FromRouter, int]] = deque()  # and how many bytes it had
        self._unread_bytes = 0
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

    @property
    def local_host(self) -> str:
        """The address that we dialled from; of this machine alone where that was no network."""
        assert self._transport is not None
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._parse()

    def eof_received(self) -> None:
        if self._buffer and self._reading:
            self._lose("the router closed the link inside a frame")
        else:
            self._lose("the router closed the link", kind=LinkClosed)

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
        frame, size = self._inbox.popleft()
        self._unread_bytes -= size
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
            raise self._kind(self._lost) from self._cause

    def _parse(self) -> None:
        """Turn bytes into frames until they run out or the inbox is full; then stop reading the socket."""
        start = 0
        try:
            while not self._full:
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
                self._inbox.append((frame, size))
                self._unread_bytes += size
                start = body + size
        except WireError as error:
            self._lose(f"the router sent garbage: {error}", error)
        del self._buffer[:start]
        full = self._full
        if self._inbox:
            self._arrived.set()
        if full == self._reading and self._lost is None:
            assert self._transport is not None
            self._reading = not full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    @property
    def _full(self) -> bool:
        return (
            len(self._inbox) >= self._max_unread
            or self._unread_bytes >= self._config.max_unread_bytes
        )

    def _go_on_reading(self) -> None:
        """Once half of what may wait is gone, so that the socket is not asked for each frame."""
        if not self._trusted or self._reading:
            return
        few = 2 * len(self._inbox) <= self._max_unread
        if few and 2 * self._unread_bytes <= self._config.max_unread_bytes:
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

    def _lose(
        self, reason: str, cause: Exception | None = None, kind: type[LinkLost] = LinkLost
    ) -> None:
        """End the link; whoever waits hears of it. The first reason counts."""
        if self._lost is not None:
            return
        self._lost = reason
        self._cause = cause
        self._kind = kind
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

"""Messages and bytes over one non-blocking socket, read straight to where they belong and sent from where they are.

The socket is never behind a transport: a transport would copy everything it moves. Works on asyncio's own loop and
on uvloop. One task reads, one task writes.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.errors import WireError
from headrace.kv_transfer.backends.base import LinkBroken
from headrace.kv_transfer.backends.spans import Spans
from headrace.kv_transfer.peers.messages import MAX_MESSAGE_BYTES, SCHEMA

HEADER_BYTES: Final = 4
MAX_FDS: Final = 4


class Stream:
    """Owns a connected socket. Every method but `close` raises LinkBroken once the connection is of no use."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._tcp = sock.family != socket.AF_UNIX
        self._least = 1  # bytes that wake us
        if self._tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._broken: str | None = None
        self.blocked = False  # something waits for the peer to take it
        # for `watch`, which resets both
        self.heard = False  # bytes came
        self.taken = False  # bytes went
        self._sending = False

    # --- in ---

    async def receive(self, limit: int = MAX_MESSAGE_BYTES) -> Any:
        """The next message."""
        return await self._message(await self._exactly(HEADER_BYTES), limit)

    async def receive_with_fds(self, limit: int) -> tuple[Any, list[int]]:
        """The next message, and the file descriptors that came with its first byte. The caller closes them."""
        first, fds = await self._first_byte()
        try:
            rest = await self._exactly(HEADER_BYTES - 1)
            return await self._message(first + rest, limit), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    async def _message(self, header: bytes | bytearray, limit: int) -> Any:
        size = int.from_bytes(header, "little")
        if size > limit:
            raise LinkBroken(f"message of {size} bytes, the limit is {limit}")
        try:
            return SCHEMA.decode(bytes(await self._exactly(size)))
        except WireError as error:
            raise LinkBroken(str(error)) from error

    async def _first_byte(self) -> tuple[bytes, list[int]]:
        while True:
            self._check()
            try:
                # that much and no more: what follows is for `receive`
                first, ancillary, _, _ = self._sock.recvmsg(
                    1, socket.CMSG_SPACE(MAX_FDS * 4), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
            except (BlockingIOError, InterruptedError):
                await self.readable()
                continue
            except OSError as error:
                raise self._lost(error) from error
            fds = array.array("i")
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if not first:
                raise LinkBroken("the peer hung up")
            return first, list(fds)

    def take_into(self, views: list[memoryview]) -> int:
        """Fill `views`, in order, with what is there: bytes written, 0 if there are none yet. Waits for nothing.

        There are at most IOV_MAX views, and some of them is not empty.
        """
        self._check()
        try:
            got = self._sock.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if got == 0:
            raise LinkBroken("the peer hung up")
        self.heard = True
        return got

    async def readable(self, least: int = 1) -> None:
        """Wait until there is something to take: over TCP `least` bytes, of which so many must be still to come."""
        if self._tcp and least != self._least:
            self._check()
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while len(rest):
            got = self.take_into([rest])
            rest = rest[got:]
            if not got:
                await self.readable()
        return data

    # --- out ---

    async def send(
        self, messages: Sequence[object], payload: list[memoryview] | None = None
    ) -> None:
        """All of `messages`, and what the last of them speaks of. Not to be cancelled if the stream is to go on."""
        parts: list[memoryview] = []
        packed = bytearray()
        for message in messages:
            body = SCHEMA.encode(message)
            packed += len(body).to_bytes(HEADER_BYTES, "little")
            packed += body
        parts.append(memoryview(packed))
        parts += payload or []
        await self._send_all(parts)

    async def send_with_fds(self, message: object, fds: list[int]) -> None:
        """One message, short enough for an empty socket, and open files. Unix sockets only."""
        body = SCHEMA.encode(message)
        data = len(body).to_bytes(HEADER_BYTES, "little") + body
        try:
            sent = socket.send_fds(self._sock, [data[:1]], fds)
        except OSError as error:
            raise self._lost(error) from error
        await self._send_all([memoryview(data)[sent:]])

    async def _send_all(self, parts: list[memoryview]) -> None:
        spans = Spans(parts)
        while spans.at < spans.size:
            self._check()
            try:
                spans.at += self._sock.sendmsg(spans.rest())
            except (BlockingIOError, InterruptedError):
                self.blocked = True
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError as error:
                raise self._lost(error) from error
            else:
                self.blocked, self.taken = False, True

    # --- the end ---

    def close(self, why: str) -> None:
        """Hang up. Whoever waits gets LinkBroken, which says `why`."""
        if self._broken is not None:
            return
        self._broken = why
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        for future in self._waiting:
            if not future.done():
                future.set_exception(LinkBroken(why))
        with suppress(OSError):  # so that the peer hears of it even if a fork keeps the socket
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise LinkBroken(self._broken)

    def _lost(self, error: OSError) -> LinkBroken:
        return LinkBroken(self._broken or error.strerror or str(error))

    async def _ready(
        self, add: Callable[..., object], remove: Callable[[socket.socket], object]
    ) -> None:
        self._check()
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        add(self._sock, _wake, future)
        try:
            await future
        finally:
            self._waiting.discard(future)
            if self._broken is None:
                remove(self._sock)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

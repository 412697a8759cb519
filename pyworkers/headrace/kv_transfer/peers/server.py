"""The source's end: listens, checks who comes, and knows what may be pulled."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import HeadraceError
from headrace.kv_transfer.backends.base import Ending, Exporter, KvSource, Limits, layout_text
from headrace.kv_transfer.backends.endpoints import exporters_for
from headrace.kv_transfer.backends.memory import open_memory, segment_bytes
from headrace.kv_transfer.peers.members import Members
from headrace.kv_transfer.peers.offers import Offers
from headrace.kv_transfer.peers.room import Room
from headrace.kv_transfer.peers.server_link import ServerLink
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import TransferFailure

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool

log = logging.getLogger(__name__)

BACKLOG: Final = 1024  # connections that wait for this loop, which may be busy for a while
ACCEPT_PAUSE_S: Final = 0.1  # after a failed accept, such as for want of file descriptors
COMPLAIN_S: Final = 10.0  # between two lines of log about strangers, whatever they do


class TransferServer:
    """Lets other workers pull blocks from `pool`. All methods are for the event loop's thread.

    `host` is where TCP listens and what clients are told to dial; None for clients on this host only.
    """

    def __init__(
        self,
        pool: KvPool,
        layout: str,
        *,
        members: Members,
        host: str | None = "127.0.0.1",
        port: int = 0,
        backends: Sequence[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._pool = pool
        self._layout = layout_text(layout, pool)
        self._members = members
        self._host, self._port = host, port
        self._backends = backends
        self._limits = limits or Limits()
        self._offers = Offers(len(pool.groups))
        self._exporters: list[Exporter] = []
        self._listening: list[tuple[socket.socket, asyncio.Task[None]]] = []
        self._serving: dict[asyncio.Task[None], ServerLink] = {}
        self.endpoints: list[str] = []  # best first, once started
        # Links that were not let in and pulls by another's ticket, by why.
        self.turned_away: Counter[str] = Counter()
        self._complained: Counter[str] = Counter()  # what has been said of them
        self._complained_s = -math.inf

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken, ValueError for a back-end that cannot be."""
        exporters = exporters_for(self._pool, self._backends)
        self._exporters = [*exporters.local, *exporters.remote]
        if exporters.local:
            name = f"headrace-{secrets.token_hex(12)}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listen(listener, f"\0{name}", exporters.local)
            self.endpoints += [f"{exporter.name}:{name}" for exporter in exporters.local]
        if exporters.remote and self._host is not None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listen(listener, (self._host, self._port), exporters.remote)
            host = f"[{self._host}]" if family == socket.AF_INET6 else self._host
            port = listener.getsockname()[1]
            self.endpoints += [f"{exporter.name}:{host}:{port}" for exporter in exporters.remote]

    async def close(self) -> None:
        """Hang up on everybody. No ticket counts any more."""
        tasks = [task for _, task in self._listening] + list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener, _ in self._listening:
            listener.close()
        self._listening.clear()
        for exporter in self._exporters:
            exporter.close()
        self._exporters.clear()
        self.endpoints.clear()

    def offer(
        self,
        source: KvSource,
        pull_key: bytes,
        on_released: Callable[[], None],
        on_failed: Callable[[], None] | None = None,
        *,
        shared: bool = False,
    ) -> bytes:
        """A ticket for one pull of `source` by who has `pull_key`, or for any number if it is `shared`.

        `on_released`: a pull has it all and was told that it counts. `on_failed`: the pull that had the ticket ended
        some other way, and nobody will ever pull it. Neither is called after `withdraw`.
        """
        return self._offers.add(source, pull_key, on_released, on_failed, shared=shared)

    def withdraw(self, ticket: bytes, why: Ending = TransferFailure.REVOKED) -> None:
        """Nothing pulled with it counts from now on. A ticket that is done already is left alone."""
        self._offers.withdraw(ticket, why)
        self.wake()

    def wake(self) -> None:
        """The progress of sources changed, or one was revoked."""
        for link in self._serving.values():
            link.wake()

    @property
    def open_tickets(self) -> int:
        return len(self._offers)

    @property
    def clients(self) -> int:
        return len(self._serving)

    # --- inside ---

    def _listen(
        self,
        listener: socket.socket,
        address: str | tuple[str, int],
        exporters: list[Exporter],
    ) -> None:
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        task = asyncio.ensure_future(self._accept(listener, exporters))
        self._listening.append((listener, task))

    async def _accept(self, listener: socket.socket, exporters: list[Exporter]) -> None:
        loop = asyncio.get_running_loop()
        room: Room[ServerLink] = Room(self._limits.max_links)
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("transfer: a client could not be accepted: %s", error)
                self._evict(room.evict())  # if descriptors are short, strangers are the first to go
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._receive(sock, address, exporters, room)
            await asyncio.sleep(0)  # however many knock, others have their turn between two of them

    def _receive(
        self, sock: socket.socket, address: Any, exporters: list[Exporter], room: Room[ServerLink]
    ) -> None:
        """Give a new connection its link, or none to another user."""
        try:
            whence = peer_address(sock, address)
        except ForeignUser:
            sock.close()  # not even a word
            self._note("user")
            return
        link = ServerLink(
            Stream(sock),
            layout=self._layout,
            exporters=exporters,
            memory=partial(open_memory, self._pool),
            segment_bytes=segment_bytes(self._pool),
            offers=self._offers,
            limits=self._limits,
            members=self._members,
            admit=room.admit,
            turned_away=self._note,
        )
        self._evict(room.enter(link, whence))
        task = asyncio.ensure_future(link.serve())
        self._serving[task] = link
        task.add_done_callback(partial(self._ended, room))

    def _evict(self, link: ServerLink | None) -> None:
        if link is not None:
            link.hang_up("a newer connection needs its place")
            self._note("evicted")

    def _note(self, why: str) -> None:
        """Count a link that was not let in, and say so now and then."""
        self.turned_away[why] += 1
        now_s = asyncio.get_running_loop().time()
        if now_s < self._complained_s + COMPLAIN_S:
            return
        news = self.turned_away - self._complained
        text = ", ".join(f"{count} {why}" for why, count in news.most_common())
        log.warning("transfer: connections were turned away: %s", text)
        self._complained, self._complained_s = self.turned_away.copy(), now_s

    def _ended(self, room: Room[ServerLink], task: asyncio.Task[None]) -> None:
        link = self._serving.pop(task)
        room.leave(link)
        link.hang_up("it ended")  # one that was cancelled before its first line has not done so
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("transfer: a connection failed", exc_info=error)


class ForeignUser(HeadraceError):
    """The other end of a Unix socket belongs to somebody else."""


def peer_address(sock: socket.socket, address: Any) -> str:
    """What strangers from one place have in common: the host, the /64 of IPv6, or the process on this host.

    Raises ForeignUser.
    """
    if sock.family == socket.AF_UNIX:
        process, user = peer_credentials(sock)
        if user != os.getuid():
            raise ForeignUser(user)
        return f"process {process}"
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if host.version == 4:
        return str(host)
    return str(host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False))


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, when it was connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user

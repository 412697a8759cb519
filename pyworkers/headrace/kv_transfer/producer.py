"""The prefill side of split serving: prompts whose KV other workers pull from here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from headrace.engine.sequence import Key
from headrace.wire.frames import Freed, KvReady, Offer, TransferFailure, Transferred

if TYPE_CHECKING:
    from headrace.engine.cache.kv_export import KvExport
    from headrace.engine.engine import Engine
    from headrace.kv_transfer.backends.base import Ending
    from headrace.kv_transfer.peers.server import TransferServer

log = logging.getLogger(__name__)

News: TypeAlias = KvReady | Transferred | Offer | Freed
Tell = Callable[[int, News], None]
"""Sends a frame to the router with this number, if it is still there."""


@dataclass(frozen=True, slots=True)
class OpenExport:
    """An export that may be pulled."""

    export: KvExport
    ticket: bytes


class Producer:
    """Tickets for the exports of one engine. All methods are for the event loop."""

    def __init__(
        self, engine: Engine, server: TransferServer, tell: Tell, wake: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._server = server
        self._tell = tell
        self._wake = wake
        self._open: dict[Key, OpenExport] = {}
        self._over: deque[Key] = deque()  # pulled, or never to be pulled; one entry for each ticket

    def offer(self) -> None:
        """Offer what was admitted, and let those who pull see what is computed. At any time, on the event loop."""
        for export in self._engine.kv_exports.take():
            key = export.key
            done, failed = partial(self._done, key), partial(self._failed, key)
            ticket = self._server.offer(export, export.pull_key, done, failed)
            self._open[key] = OpenExport(export, ticket)
            self._tell(key.link, KvReady(key.request, ticket, export.lease_ms))
        if self._open:
            self._server.wake()

    def settle(self) -> None:
        """Tell the engine which exports are over, and withdraw those that it took back."""
        while self._over:
            key = self._over.popleft()
            if self._open.pop(key, None) is None:
                continue  # it ended on this side at the same time
            blocks = self._engine.released(key)
            if blocks is not None:
                self._tell(key.link, Freed(key.request, blocks))
        for key, it in list(self._open.items()):
            if it.export.revoked:
                log.warning("handoff lease_over: nobody has pulled request %d in time", key.request)
                self._close(key, TransferFailure.EXPIRED)
        self.offer()

    def withdraw(self, key: Key) -> None:
        """Nobody reads its blocks from now on, or what was read does not count."""
        if key in self._open:
            self._close(key)

    def withdraw_link(self, link: int) -> None:
        """The same for all requests of a router."""
        for key in [key for key in self._open if key.link == link]:
            self._close(key)

    def withdraw_all(self) -> None:
        """The same for all."""
        for key in list(self._open):
            self._close(key)

    def _close(self, key: Key, why: Ending = TransferFailure.REVOKED) -> None:
        self._server.withdraw(self._open.pop(key).ticket, why)

    def _done(self, key: Key) -> None:
        """The puller has it all. May come in the middle of a step."""
        self._over.append(key)
        self._wake()

    def _failed(self, key: Key) -> None:
        """The pull broke off, and its ticket is spent."""
        log.warning("handoff export_unused: the pull of request %d ended early", key.request)
        self._done(key)

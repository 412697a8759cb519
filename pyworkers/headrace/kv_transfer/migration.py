"""The hot blocks of a worker that leaves: offered by it, fetched by those that stay."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.sequence import Key
from headrace.kv_transfer.producer import Tell
from headrace.kv_transfer.pulls import Pull, Puller
from headrace.wire.frames import (
    NAME_BYTES,
    Fetch,
    MigrationOrder,
    Offer,
    TransferFailure,
    Transferred,
)

if TYPE_CHECKING:
    from headrace.engine.cache.migration import Adoption
    from headrace.engine.engine import Engine
    from headrace.kv_transfer.peers.server import TransferServer

log = logging.getLogger(__name__)

MOST_OFFERED = 65_536  # blocks in one Offer, of about 26 bytes each: 2 MiB. A guess
MOST_FETCHES = 256  # in flight at a time, of all routers: one for each worker that leaves. A guess
LEASE_S = 30.0  # the longest that hot blocks stay pinned for others. A guess


@dataclass(slots=True)
class Pinned:
    """Blocks as a source of pulls: complete, and read any number of times."""

    blocks: Sequence[int]
    revoked: bool = False

    def ready(self, place: int, group: int) -> bool:
        """They were computed before they were named."""
        del place, group
        return True


class Migration:
    """At most one offer, to the router that asked for it last. All methods are for the event loop."""

    def __init__(self, engine: Engine, server: TransferServer) -> None:
        self._engine = engine
        self._server = server
        self._ticket: bytes | None = None
        self._source: Pinned | None = None
        self.until_s: float | None = None  # None: nothing is offered

    def offer(self, order: MigrationOrder, budget_s: float, now_s: float) -> Offer:
        """Pin as many of the hottest blocks as `order` says and let them be pulled. An offer made before ends."""
        self.end()
        most = min(order.blocks, MOST_OFFERED)
        hot = self._engine.pool.hottest(most)  # parents first, whole chains
        names = [block.name for block in hot]
        lease_s = min(budget_s, LEASE_S)
        self._source = Pinned(self._engine.pinned.pin(names))
        self._ticket = self._server.offer(self._source, order.pull_key, lambda: None, shared=True)
        self.until_s = now_s + lease_s
        place = {name: at for at, name in enumerate(names)}
        return Offer(
            ticket=self._ticket,
            names=b"".join(names),
            parents=[-1 if block.parent is None else place[block.parent] for block in hot],
            hits=[block.hits for block in hot],
            lease_ms=int(lease_s * 1e3),
        )

    def settle(self, now_s: float) -> None:
        """End an offer whose lease is over."""
        if self.until_s is not None and self.until_s <= now_s:
            self.end()

    def end(self) -> None:
        """Nobody pulls the blocks any more; they may be evicted again."""
        if self._ticket is None or self._source is None:
            return
        self._source.revoked = True
        self._server.withdraw(self._ticket, TransferFailure.EXPIRED)
        self._engine.pinned.release(list(self._source.blocks))
        self._ticket = self._source = self.until_s = None


@dataclass(frozen=True, slots=True)
class Fetching:
    """One fetch in flight."""

    pull: Pull
    adoption: Adoption
    until_s: float


class Fetches:
    """Hot blocks on their way into the prefix cache. All methods are for the event loop."""

    def __init__(self, engine: Engine, puller: Puller, tell: Tell) -> None:
        self._engine = engine
        self._puller = puller
        self._tell = tell
        self._in_flight: dict[Key, Fetching] = {}

    @property
    def next_deadline_s(self) -> float:
        """When the first of them is to be given up; those that were need a while to stop."""
        going = (it for it in self._in_flight.values() if it.pull.stopped is None)
        return min((it.until_s for it in going), default=math.inf)

    def fetch(self, key: Key, fetch: Fetch, now_s: float) -> None:
        """Pull what is not here yet, as far as there is room. Every fetch is reported."""
        if key in self._in_flight:
            log.debug("handoff: fetch %d is here already", key.request)
            return
        if len(self._in_flight) >= MOST_FETCHES:
            source, why = fetch.kv_from.worker, TransferFailure.NO_ROOM
            self._tell(key.link, Transferred(key.request, source, None, 0, 0, 0.0, why))
            return
        starts = range(0, len(fetch.names), NAME_BYTES)
        names = [fetch.names[start : start + NAME_BYTES] for start in starts]
        adoption = self._engine.pinned.adopt(names, fetch.parents)
        wanted = [(fetch.offset[place], block) for place, block in adoption.wanted]
        may_write = self._engine.steps.ended_check()
        pull = Pull(key, fetch.kv_from, fetch.ticket, wanted, self._ended, may_write)
        until_s = now_s + fetch.kv_from.timeout_ms / 1e3
        self._in_flight[key] = Fetching(pull, adoption, until_s)
        self._puller.start(pull)

    def settle(self, now_s: float) -> None:
        """Give up what is late."""
        for it in self._in_flight.values():
            if it.until_s <= now_s:
                self._puller.stop(it.pull, TransferFailure.TIMEOUT)

    def cancel(self, key: Key) -> None:
        if key in self._in_flight:
            self._puller.stop(self._in_flight[key].pull, TransferFailure.CANCELLED)

    def cancel_link(self, link: int) -> None:
        """Cancel all of a router."""
        for key in self._in_flight:
            if key.link == link:
                self.cancel(key)

    def _ended(self, key: Key, report: Transferred) -> None:
        adoption = self._in_flight.pop(key).adoption
        self._engine.pinned.end(adoption, arrived=report.error is None)
        self._tell(key.link, report)

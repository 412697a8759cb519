"""The decode side of split serving: requests whose prompt another worker computes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.kv_transfer.producer import Tell
from headrace.kv_transfer.pulls import Job, Puller
from headrace.wire.frames import Freed, KvFrom, TransferFailure, Transferred

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AwaitedKv:
    """One request, from its Submit until it goes on and its KV has come or is given up."""

    kv_from: KvFrom
    ticket: bytes | None = None
    job: Job | None = None
    over: bool = False  # its KV is here, or will not come
    going: bool = False  # Continue came
    until_s: float = math.inf  # from Continue on: later, the KV is computed here


class Consumer:
    """Requests of one engine that wait for KV. All methods are for the event loop."""

    def __init__(self, engine: Engine, puller: Puller, tell: Tell) -> None:
        self._engine = engine
        self._puller = puller
        self._tell = tell
        self._waiting: dict[Key, AwaitedKv] = {}

    @property
    def next_deadline_s(self) -> float:
        """When the first of them is to be given up."""
        return min((it.until_s for it in self._waiting.values()), default=math.inf)

    def submitted(self, key: Key, kv_from: KvFrom) -> None:
        self._waiting[key] = AwaitedKv(kv_from)

    def ticket(self, key: Key, ticket: bytes) -> None:
        """The first one counts. One for a request that is not here crossed its end."""
        arrival = self._waiting.get(key)
        if arrival is None or arrival.over or arrival.ticket is not None:
            log.debug("handoff: a ticket for request %d, which waits for none", key.request)
            return
        arrival.ticket = ticket
        self._engine.ticket(key)

    def go_on(self, key: Key, generated: bytes, now_s: float) -> None:
        """The first token is known; or nothing comes, and the request is to do it all itself.

        Raises RequestError for tokens that cannot be.
        """
        arrival = self._waiting.get(key)
        if arrival is None or arrival.going:
            return
        if len(generated) > 4 * self._engine.context_tokens:
            text = f"{len(generated) // 4} tokens, the context is {self._engine.context_tokens}"
            raise RequestError(FailureKind.BAD_RESUME, text)
        tokens: list[int] = np.frombuffer(generated, dtype="<u4").tolist()
        self._engine.go_on(key, tokens, now_s)
        arrival.going = True
        if arrival.over:
            del self._waiting[key]
        elif tokens:
            arrival.until_s = now_s + arrival.kv_from.timeout_ms / 1e3
        else:
            self._give_up(key, arrival, TransferFailure.CANCELLED)

    def ended(self, key: Key) -> None:
        """The request is over. Where something may still write to its blocks, they are free once that has stopped."""
        arrival = self._waiting.pop(key, None)
        if arrival is not None and arrival.job is not None:
            self._puller.stop(arrival.job, TransferFailure.CANCELLED)

    def ended_link(self, link: int) -> None:
        """The same for all requests of a router."""
        for key in [key for key in self._waiting if key.link == link]:
            self.ended(key)

    def settle(self, now_s: float) -> None:
        """Give up what is late, start the pulls that have their blocks."""
        for key, arrival in list(self._waiting.items()):
            if arrival.until_s <= now_s:
                self._give_up(key, arrival, TransferFailure.TIMEOUT)
        for pull in self._engine.kv_imports.take_pulls():
            arrival = self._waiting.get(pull.key)
            if arrival is None or arrival.over:  # since it got its blocks
                self._failed(pull.key)
                continue
            assert arrival.ticket is not None, "blocks are reserved for a ticket"
            arrival.job = Job(
                pull.key, arrival.kv_from, arrival.ticket, pull.wanted, settle=self._arrived
            )
            self._puller.start(arrival.job)

    def _give_up(self, key: Key, arrival: AwaitedKv, why: TransferFailure) -> None:
        """Compute it here, from the moment that nothing writes to its blocks."""
        arrival.until_s = math.inf
        if arrival.job is not None:
            self._puller.stop(arrival.job, why)
            return
        del self._waiting[key]
        if why == TransferFailure.TIMEOUT:  # otherwise there never was anything to report
            if (
                arrival.ticket is not None
            ):  # it waited for blocks of ours, so the source is not to blame
                why = TransferFailure.NO_ROOM
            log.warning(
                "handoff transfer_late: request %d got no KV from %s within %d ms: %s",
                *(key.request, arrival.kv_from.worker, arrival.kv_from.timeout_ms, why),
            )
            late_ms = float(arrival.kv_from.timeout_ms)
            report = Transferred(key.request, arrival.kv_from.worker, None, 0, 0, late_ms, why)
            self._tell(key.link, report)
        self._failed(key)

    def _arrived(self, job: Job) -> None:
        arrival = self._waiting.get(job.key)
        if arrival is not None:
            arrival.over, arrival.until_s = True, math.inf
            if arrival.going:
                del self._waiting[job.key]
        self._tell(job.key.link, job.report)
        if job.pulled is None:
            self._failed(job.key)
        else:
            self._freed(job.key, self._engine.pulled(job.key))

    def _failed(self, key: Key) -> None:
        self._freed(key, self._engine.pull_failed(key))

    def _freed(self, key: Key, blocks: int | None) -> None:
        """The engine says how many blocks it freed where the request was cancelled meanwhile."""
        if blocks is not None:
            self._tell(key.link, Freed(key.request, blocks))

"""Pulls in flight: so many of each source at a time, the rest in order. Each ends once, when nothing writes to the pool
any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.sequence import Key
from headrace.kv_transfer.backends.base import BoundTicket, TransferError
from headrace.wire.frames import KvFrom, TransferBackend, TransferFailure, Transferred

if TYPE_CHECKING:
    from headrace.kv_transfer.peers.client import TransferClient

log = logging.getLogger(__name__)

# At a time. Most of them wait for a source to compute: one that gives nothing must not hold back the others. Guesses
MAX_PULLS_OF_SOURCE = 64
MAX_PULLS = 1024
LONGEST_PULL_S = (
    3600.0  # for one that nobody sets a shorter limit for: its source computes a very long prompt
)


@dataclass(slots=True, eq=False)
class Pull:
    """What to pull for the request or fetch `key`. `ended` is called on the event loop, once."""

    key: Key
    kv_from: KvFrom
    ticket: bytes
    wanted: Sequence[tuple[int, int]]  # place at the source, our block
    ended: Callable[[Key, Transferred], None]
    may_write: Callable[[], bool] = lambda: True  # to our blocks; its turn does not come before
    began_s: float = 0.0  # when it was its turn
    stopped: TransferFailure | None = None  # why we ended it, if we did

    @property
    def source(self) -> tuple[str, ...]:
        """What the connection that it shares with others is known by."""
        return tuple(self.kv_from.transfer)

    def failed(
        self, why: TransferFailure, backend: TransferBackend | None = None, ms: float = 0.0
    ) -> Transferred:
        return Transferred(self.key.request, self.kv_from.worker, backend, 0, 0, ms, why)


class Puller:
    """Runs pulls. `settle` tells of the end of each exactly once, and `wake` is called when there is one to tell of."""

    def __init__(self, client: TransferClient, wake: Callable[[], None]) -> None:
        self._client = client
        self._wake = wake
        self._queue: deque[Pull] = deque()  # their turn is still to come
        self._running: dict[Pull, asyncio.Task[Transferred]] = {}
        self._of_source: Counter[tuple[str, ...]] = Counter()  # of those that run
        self._ended: list[tuple[Pull, Transferred]] = []

    @property
    def idle(self) -> bool:
        return not self._queue and not self._running and not self._ended

    def start(self, pull: Pull) -> None:
        """At once, or when one of those before has ended."""
        if self._may_run(pull):  # then nothing of its source waits for its turn
            self._run_now(pull)
        else:
            self._queue.append(pull)

    def stop(self, pull: Pull, why: TransferFailure) -> None:
        """End `pull`; it is among the ended as soon as nothing writes to the pool. A second call changes nothing.

        One that never had its turn was late for want of room here, whatever its source did.
        """
        if pull.stopped is not None:
            return
        if (task := self._running.get(pull)) is not None:
            pull.stopped = why
            task.cancel()
        elif pull in self._queue:
            pull.stopped = why
            self._queue.remove(pull)
            late = why is TransferFailure.TIMEOUT
            self._end(pull, pull.failed(TransferFailure.NO_ROOM if late else why))

    def stop_all(self, why: TransferFailure) -> None:
        for pull in [*self._queue, *self._running]:
            self.stop(pull, why)

    def settle(self) -> None:
        """Tell of those that ended since the last call, and begin those that may write now."""
        ended, self._ended = self._ended, []
        for pull, report in ended:
            pull.ended(pull.key, report)
        while self._next():
            pass

    def _may_run(self, pull: Pull) -> bool:
        own = self._of_source[pull.source]
        return pull.may_write() and len(self._running) < MAX_PULLS and own < MAX_PULLS_OF_SOURCE

    def _run_now(self, pull: Pull) -> None:
        self._of_source[pull.source] += 1
        pull.began_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._run(pull), name=f"pull {pull.key.request}")
        self._running[pull] = task
        task.add_done_callback(lambda task: self._over(pull, task))

    def _next(self) -> bool:
        """Begin the first in the queue that may run now. False where there is none."""
        pull = next(filter(self._may_run, self._queue), None)
        if pull is None:
            return False
        self._queue.remove(pull)
        self._run_now(pull)
        return True

    async def _run(self, pull: Pull) -> Transferred:
        try:
            ticket = BoundTicket(pull.ticket, pull.kv_from.pull_key)
            moved = await self._client.pull(
                pull.kv_from.transfer, ticket, pull.wanted, timeout_s=LONGEST_PULL_S
            )
        except TransferError as error:
            log.warning(
                "handoff transfer_failed: request %d from %s: %s",
                *(pull.key.request, pull.kv_from.worker, error),
            )
            return pull.failed(error.kind, error.backend, self._ms(pull))
        return Transferred(
            request=pull.key.request,
            worker=pull.kv_from.worker,
            backend=moved.backend,
            blocks=moved.blocks,
            bytes=moved.bytes,
            ms=moved.ms,
            error=None,
        )

    def _ms(self, pull: Pull) -> float:
        return (asyncio.get_running_loop().time() - pull.began_s) * 1e3

    def _over(self, pull: Pull, task: asyncio.Task[Transferred]) -> None:
        """Its task is done, whatever became of it: cancelled before its first line, too."""
        del self._running[pull]
        self._of_source -= Counter([pull.source])  # drops what is at 0
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            log.error("handoff transfer_broken: request %d", pull.key.request, exc_info=failure)
        if task.cancelled() and pull.stopped is not None:
            log.warning(
                "handoff transfer_stopped: request %d from %s: %s",
                *(pull.key.request, pull.kv_from.worker, pull.stopped),
            )
        if task.cancelled() or failure is not None:
            why = pull.stopped or TransferFailure.LOST
            self._end(pull, pull.failed(why, ms=self._ms(pull)))
        else:
            self._end(pull, task.result())
        self._next()

    def _end(self, pull: Pull, report: Transferred) -> None:
        self._ended.append((pull, report))
        self._wake()

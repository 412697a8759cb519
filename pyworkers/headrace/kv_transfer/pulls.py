"""Pulls in flight: so many of each source at a time, the rest in order. Each ends once, when nothing writes to the pool
any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.sequence import Key
from headrace.kv_transfer.backends.base import TransferError
from headrace.wire.frames import KvFrom, TransferBackend, TransferFailure, Transferred

if TYPE_CHECKING:
    from headrace.kv_transfer.backends.base import Pulled
    from headrace.kv_transfer.peers.client import TransferClient

log = logging.getLogger(__name__)

# At a time. Most of them wait for a source to compute: one that gives nothing must not hold back the others. Guesses
MAX_PULLS_OF_SOURCE = 64
MAX_PULLS = 1024
LONGEST_PULL_S = (
    3600.0  # for one that nobody sets a shorter limit for: its source computes a very long prompt
)


@dataclass(slots=True, eq=False)
class Job:
    """One pull. `key` is the request that waits for it; `settle` is called on the event loop, once it has ended."""

    key: Key
    kv_from: KvFrom
    ticket: bytes
    wanted: Sequence[tuple[int, int]]  # place at the source, our block
    settle: Callable[[Job], None]
    may_write: Callable[[], bool] = lambda: True  # to our blocks; its turn does not come before
    began_s: float = 0.0  # when it was its turn
    task: asyncio.Task[None] | None = None
    stopped: TransferFailure | None = None  # why we ended it, if we did
    pulled: Pulled | None = None
    error: TransferFailure | None = None
    backend: TransferBackend | None = None
    ended_s: float = field(default=0.0)

    @property
    def source(self) -> tuple[str, ...]:
        """What the connection that it shares with others is known by."""
        return tuple(self.kv_from.transfer)

    @property
    def report(self) -> Transferred:
        """What the router hears of it, once it has ended."""
        moved = self.pulled
        if moved is not None:
            return Transferred(
                request=self.key.request,
                worker=self.kv_from.worker,
                backend=moved.backend,
                blocks=moved.blocks,
                bytes=moved.bytes,
                ms=moved.ms,
                error=None,
            )
        ms = (self.ended_s - self.began_s) * 1e3
        return Transferred(
            self.key.request, self.kv_from.worker, self.backend, 0, 0, ms, self.error
        )


class Puller:
    """Runs jobs. `settle` settles each exactly once, and `wake` is called when there is one to settle."""

    def __init__(self, client: TransferClient, wake: Callable[[], None]) -> None:
        self._client = client
        self._wake = wake
        self._queue: deque[Job] = deque()  # their turn is still to come
        self._running: set[Job] = set()
        self._of_source: Counter[tuple[str, ...]] = Counter()  # of those that run
        self._ended: list[Job] = []

    @property
    def idle(self) -> bool:
        return not self._queue and not self._running and not self._ended

    def start(self, job: Job) -> None:
        """At once, or when one of those before has ended."""
        if self._may_run(job):  # then nothing of its source waits for its turn
            self._run_now(job)
        else:
            self._queue.append(job)

    def stop(self, job: Job, why: TransferFailure) -> None:
        """End `job`; it is among the ended as soon as nothing writes to the pool. A second call changes nothing.

        One that never had its turn was late for want of room here, whatever its source did.
        """
        if job.stopped is not None or job.ended_s:
            return
        job.stopped = why
        if job in self._running:
            assert job.task is not None
            job.task.cancel()
        else:
            self._queue.remove(job)
            job.began_s = asyncio.get_running_loop().time()
            self._end(job, TransferFailure.NO_ROOM if why == TransferFailure.TIMEOUT else why)

    def stop_all(self, why: TransferFailure) -> None:
        for job in [*self._queue, *self._running]:
            self.stop(job, why)

    def settle(self) -> None:
        """Settle those that ended since the last call, and begin those that may write now."""
        ended, self._ended = self._ended, []
        for job in ended:
            job.settle(job)
        while self._next():
            pass

    def _may_run(self, job: Job) -> bool:
        own = self._of_source[job.source]
        return job.may_write() and len(self._running) < MAX_PULLS and own < MAX_PULLS_OF_SOURCE

    def _run_now(self, job: Job) -> None:
        self._running.add(job)
        self._of_source[job.source] += 1
        job.began_s = asyncio.get_running_loop().time()
        job.task = asyncio.create_task(self._run(job), name=f"pull {job.key.request}")
        job.task.add_done_callback(lambda _, job=job: self._over(job))

    def _next(self) -> bool:
        """Begin the first in the queue that may run now. False where there is none."""
        job = next(filter(self._may_run, self._queue), None)
        if job is None:
            return False
        self._queue.remove(job)
        self._run_now(job)
        return True

    async def _run(self, job: Job) -> None:
        try:
            job.pulled = await self._client.pull(
                job.kv_from.transfer, job.ticket, job.wanted, timeout_s=LONGEST_PULL_S
            )
        except TransferError as error:
            job.error, job.backend = error.kind, error.backend
            log.warning(
                "handoff transfer_failed: request %d from %s: %s",
                *(job.key.request, job.kv_from.worker, error),
            )

    def _over(self, job: Job) -> None:
        """Its task is done, whatever became of it: cancelled before its first line, too."""
        assert job.task is not None
        self._running.discard(job)
        self._of_source -= Counter([job.source])  # drops what is at 0
        failure = None if job.task.cancelled() else job.task.exception()
        if failure is not None:
            log.error("handoff transfer_broken: request %d", job.key.request, exc_info=failure)
        if job.pulled is None and job.error is None:
            job.error = job.stopped or TransferFailure.LOST
            if job.stopped is not None:
                log.warning(
                    "handoff transfer_stopped: request %d from %s: %s",
                    *(job.key.request, job.kv_from.worker, job.stopped),
                )
        self._end(job, job.error)
        self._next()

    def _end(self, job: Job, error: TransferFailure | None) -> None:
        job.error = error
        job.ended_s = asyncio.get_running_loop().time()
        self._ended.append(job)
        self._wake()

"""Where each sequence is: waiting, with a batch row, or with blocks only.

Sequences whose KV moves between workers have blocks without a batch row for a while. One whose KV comes waits for
blocks in order with the others, then it is parked until all is there, then it is ready for a batch row. One whose KV
goes is parked from its first token on, and nothing takes its blocks before.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.cache.publishing import Publishing
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Sequence, Stage
from headrace.engine.step.row_counts import Ints, RowCounts


class Stages:
    """Moves sequences from stage to stage. `running`, `waiting` and `ready` are sorted by `Sequence.order`."""

    def __init__(
        self, pool: BlockPool, columns: RowCounts, publishing: Publishing, *, max_waiting: int
    ) -> None:
        self._pool = pool
        self.columns = columns
        self.publishing = publishing
        self.max_waiting = max_waiting
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.parked: set[Sequence] = set()
        self.preemptions = 0
        self.stalled = False  # a plan would be empty until something changes
        self.importing = 0  # of those who wait, how many wait for blocks only
        self.free_rows = list(range(len(columns.taken) - 1, -1, -1))
        self._in_order: Ints | None = None  # the batch rows of `running`, unless that changed

    @property
    def idle(self) -> bool:
        """There is nothing to compute until something new comes, or parked sequences move on."""
        return not self.running and (self.stalled or not (self.waiting or self.ready))

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before all requests decode: of those that wait, and of those whose prompt is in flight.

        What the prefix cache gives is known, and left out, from a request's start on. A prompt whose KV comes from
        elsewhere is none of it.
        """
        tokens = sum(sequence.total for sequence in self.waiting if sequence.kv_import is None)
        return tokens + self.columns.core.prompt_tokens(self.batch_rows)

    def check_queue(self, others: int) -> None:
        """Raises `RequestError` when `max_waiting` sequences wait, here or as one of `others`."""
        waiting = len(self.waiting) + others
        if waiting >= self.max_waiting:
            raise RequestError(
                FailureKind.QUEUE_FULL,
                f"{waiting} requests wait, the limit is {self.max_waiting}",
            )

    def wait(self, sequence: Sequence) -> None:
        """Let `sequence`, which is outside, wait."""
        assert sequence.stage is Stage.OUTSIDE
        insort(self.waiting, sequence, key=by_order)
        self.importing += sequence.kv_import is not None
        sequence.stage = Stage.WAITING
        self.stalled = False

    def remove(self, sequence: Sequence) -> int:
        """Take a sequence out at any stage; returns how many blocks it gave back."""
        self.stalled = False
        match sequence.stage:
            case Stage.OUTSIDE:
                pass
            case Stage.WAITING:
                _take_out(self.waiting, sequence)
                self.importing -= sequence.kv_import is not None
            case Stage.RUNNING:
                self._give_up_row(sequence)
            case Stage.PARKED:
                self.parked.remove(sequence)
            case Stage.READY:
                _take_out(self.ready, sequence)
        sequence.stage = Stage.OUTSIDE
        return self._give_back(sequence)

    def park(self, sequence: Sequence) -> None:
        """A running sequence leaves the batch and keeps its blocks."""
        self._give_up_row(sequence)
        self.parked.add(sequence)
        sequence.stage = Stage.PARKED

    def park_reserved(self, sequence: Sequence) -> None:
        """One that waited for blocks only has them: its KV comes from elsewhere."""
        self.importing -= 1
        self.parked.add(sequence)
        sequence.stage = Stage.PARKED

    def unpark(self, sequence: Sequence) -> None:
        """A parked sequence has all its KV: it may decode."""
        assert sequence.stage is Stage.PARKED
        self.parked.remove(sequence)
        insort(self.ready, sequence, key=by_order)
        sequence.stage = Stage.READY
        self.stalled = False

    def changed(self) -> None:
        """There may be more room than at the last plan."""
        self.stalled = False

    def preempt(self, sequence: Sequence) -> None:
        """It gives its blocks back and waits again."""
        if sequence.prompt_logprobs is not None and not sequence.pending_tokens:
            sequence.prompt_logprobs = []  # they start again with the prompt
        if sequence.pooled is not None:
            sequence.pooled.reset()
        self.remove(sequence)
        self.preemptions += 1
        self.wait(sequence)

    @property
    def batch_rows(self) -> Ints:
        """Those of `running`, in its order."""
        if self._in_order is None:
            batch_rows = [sequence.batch_row for sequence in self.running]
            self._in_order = np.array(batch_rows, dtype=np.int64)
        return self._in_order

    def take_row(self, sequence: Sequence) -> None:
        """It has blocks, and gets a batch row, of which there is one."""
        self.columns.take(sequence, self.free_rows.pop())
        sequence.blocks_in_table = 0
        sequence.stage = Stage.RUNNING
        insort(self.running, sequence, key=by_order)
        self._in_order = None
        self.publishing.begin(sequence.names[sequence.published :])

    def _give_up_row(self, sequence: Sequence) -> None:
        _take_out(self.running, sequence)
        self._in_order = None
        self.publishing.end(sequence.names[sequence.published :])
        self.free_rows.append(self.columns.leave(sequence))

    def _give_back(self, sequence: Sequence) -> int:
        released = len(sequence.blocks)
        self._pool.release(sequence.blocks)
        self._pool.release(sequence.twins)  # after their children
        sequence.blocks = []
        sequence.twins = []
        sequence.held = 0
        sequence.computed = sequence.published = sequence.drafts = 0
        sequence.pending_rows = sequence.pending_tokens = sequence.pending_drafts = 0
        return released

    def check(self) -> None:
        """Assert that every sequence is where it says."""
        for sequences in (self.running, self.waiting, self.ready):
            assert sequences == sorted(sequences, key=by_order), "sequences are not in order"
        batch_rows = [sequence.batch_row for sequence in self.running]
        assert len({*batch_rows, *self.free_rows}) == len(self.columns.taken), (
            "a batch row is taken twice or lost"
        )
        importing = sum(sequence.kv_import is not None for sequence in self.waiting)
        assert importing == self.importing, "miscounted who waits for blocks only"
        assert [*self.batch_rows] == batch_rows, "batch rows are not in order"
        self.columns.check()
        self.publishing.check(self.running)

    def held(self) -> list[int]:
        """The blocks of all sequences, once for each time."""
        held: list[int] = []
        for sequence in (*self.running, *self.ready, *self.parked):
            held += sequence.blocks + sequence.twins
        return held


def by_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    place = bisect_left(sequences, sequence.order, key=by_order)
    assert sequences[place] is sequence
    del sequences[place]

"""What the engine counts of running sequences, in arrays by batch row: a step touches those that need something.

The counts of a sequence always stand in an array, to which its attributes lead (`Count`): one of its own, or from the
moment that it has a batch row a column of `RowCounts.counts`. So there is one place for each number, whoever asks.

These are the engine's. What the thread of the steps knows of the same batch rows is `InputBatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, overload

import numpy as np
from numpy.typing import NDArray

from headrace import _core

if TYPE_CHECKING:
    from headrace.engine.sequence import Sequence

Ints = NDArray[np.int64]

# Rows of `RowCounts.counts`, and places in `Sequence.counts`.
TOTAL: Final = 0
COMPUTED: Final = 1
PENDING_ROWS: Final = 2
PENDING_TOKENS: Final = 3
PENDING_DRAFTS: Final = 4
DRAFTS: Final = 5
KEYS_FROM: Final = 6
KEYS_TO: Final = 7
PUBLISHED: Final = 8
HELD: Final = 9
BLOCKS_IN_TABLE: Final = 10
LISTED: Final = 11
COUNTS: Final = 12

# Tokens of a row that are kept in an array; more than a step gives it. Each time that they are written over, they are
# listed first, which at 64 and two tokens a step cost a tenth of the step. A guess
LEAST_RECENT: Final = 256


class Count:
    """An attribute of a sequence that stands at `place` of its `counts`."""

    def __init__(self, place: int) -> None:
        self._place = place

    @overload
    def __get__(self, sequence: None, owner: type[Sequence]) -> Count: ...
    @overload
    def __get__(self, sequence: Sequence, owner: type[Sequence]) -> int: ...
    def __get__(self, sequence: Sequence | None, owner: type[Sequence]) -> Count | int:
        return self if sequence is None else sequence.counts.item(self._place)

    def __set__(self, sequence: Sequence, value: int) -> None:
        sequence.counts[self._place] = value


class RowCounts:
    """All arrays are `[batch rows]`. What stands at a free batch row means nothing, but for `taken` and `epoch`.

    `recent` is a ring for each of them: it has the last tokens of the sequence, each at its position. So a step writes
    all tokens that it gave at once, and the blocks that they fill are read at once. A sequence lists its tokens when
    somebody asks for them, before they are written over, and when it leaves.
    """

    def __init__(self, batch_rows: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        ring_blocks = max(2, -(-LEAST_RECENT // block_tokens))
        self.recent = np.zeros((batch_rows, ring_blocks * block_tokens), dtype=np.int32)
        self.counts = np.zeros((COUNTS, batch_rows), dtype=np.int64)
        self.total = self.counts[TOTAL]
        self.computed = self.counts[COMPUTED]
        self.pending_rows = self.counts[PENDING_ROWS]
        self.pending_tokens = self.counts[PENDING_TOKENS]
        self.pending_drafts = self.counts[PENDING_DRAFTS]
        self.drafts = self.counts[DRAFTS]
        self.keys_from = self.counts[KEYS_FROM]
        self.keys_to = self.counts[KEYS_TO]
        self.published = self.counts[PUBLISHED]
        self.held = self.counts[HELD]
        self.blocks_in_table = self.counts[BLOCKS_IN_TABLE]
        self.listed = self.counts[LISTED]
        facts = np.zeros((4, batch_rows), dtype=np.int64)
        self.prompt_len, self.limit, self.link, self.epoch = facts  # epochs count who had the row
        self.request = np.zeros(batch_rows, dtype=np.uint64)
        # `exports_kv`: its answer is another worker's. `plain`: a token of it is all that there is to say, because it
        # answers here, and the first Output is out.
        flags = np.zeros((3, batch_rows), dtype=np.bool_)
        self.exports_kv, self.plain, self.taken = flags
        self.sequences = np.empty(batch_rows, dtype=np.object_)
        self._of: tuple[Ints, NDArray[np.object_]] | None = None  # those asked for last
        self.core = _core.CountColumns(
            counts=self.counts,
            facts=facts,
            flags=flags,
            requests=self.request,
            recent=self.recent,
            block_tokens=block_tokens,
        )

    def take(self, sequence: Sequence, batch_row: int) -> None:
        """`sequence` has this batch row, which nobody had."""
        assert not self.taken[batch_row] and sequence.batch_row is None
        self.counts[:, batch_row] = sequence.counts
        sequence.counts = self.counts[:, batch_row]
        sequence.batch_row = batch_row
        self.prompt_len[batch_row], self.limit[batch_row] = sequence.prompt_len, sequence.limit
        self.link[batch_row], self.request[batch_row] = sequence.key
        self.exports_kv[batch_row] = sequence.export_lease_ms is not None
        self.plain[batch_row] = sequence.answered and sequence.export_lease_ms is None
        self.taken[batch_row] = True
        self.sequences[batch_row] = sequence
        self._of = None
        ring = self.recent[batch_row]
        start = max(sequence.total - len(ring), 0)
        ring[np.arange(start, sequence.total) % len(ring)] = sequence.tokens(start, sequence.total)
        sequence.recent = ring

    def leave(self, sequence: Sequence) -> int:
        """It keeps its counts; returns the batch row that it had, which another may take."""
        batch_row = sequence.batch_row
        assert batch_row is not None and self.sequences[batch_row] is sequence
        sequence.list_recent()
        sequence.counts = sequence.counts.copy()
        sequence.batch_row = sequence.recent = None
        self.taken[batch_row] = False
        self.epoch[batch_row] += 1
        self.sequences[batch_row] = None
        self._of = None
        return batch_row

    def answered(self, sequence: Sequence) -> None:
        """Its first Output goes out."""
        sequence.answered = True
        if sequence.batch_row is not None:
            self.plain[sequence.batch_row] = sequence.export_lease_ms is None

    def at(self, batch_row: int | np.int64) -> Sequence:
        return self.sequences.item(batch_row)

    def sequences_of(self, batch_rows: Ints) -> list[Sequence]:
        return self.sequences[batch_rows].tolist()

    def sequences_at(self, batch_rows: Ints) -> NDArray[np.object_]:
        """The same as an array, which is for reading only: step after step has the one of before, as long as the same
        array asks and no row changes hands, because to count references is to touch every sequence.
        """
        if self._of is None or self._of[0] is not batch_rows:
            self._of = batch_rows, self.sequences[batch_rows]
        return self._of[1]

    def check(self) -> None:
        """Assert that the arrays say what the sequences are."""
        for batch_row in range(len(self.taken)):
            sequence: Sequence | None = self.sequences[batch_row]
            assert self.taken[batch_row] == (sequence is not None), "a batch row is taken by nobody"
            if sequence is None:
                continue
            assert sequence.batch_row == batch_row, "a sequence is not where it sits"
            assert np.shares_memory(sequence.counts, self.counts[:, batch_row]), (
                "two places for counts"
            )
            ring, total = self.recent[batch_row], sequence.total
            assert sequence.recent is not None and np.shares_memory(sequence.recent, ring), (
                "tokens go elsewhere"
            )
            listed = sequence.prompt_len + len(sequence.listed)
            assert self.listed[batch_row] == listed, "miscounted tokens"
            assert listed <= total <= listed + len(ring), "tokens were lost"
            known = np.arange(max(total - len(ring), 0), listed)
            tokens = sequence.tokens(int(known[0]), listed) if len(known) else known
            assert (ring[known % len(ring)] == tokens).all(), "the ring has other tokens"
            assert sequence.held == len(sequence.blocks), "miscounted blocks"
            assert sequence.blocks_in_table <= sequence.held, "a table of more than there is"
            assert sequence.key == (self.link[batch_row], int(self.request[batch_row])), (
                "another's key"
            )
            assert self.prompt_len[batch_row] == sequence.prompt_len, "another's prompt"
            assert self.limit[batch_row] == sequence.limit, "another's limit"
            plain = sequence.answered and sequence.export_lease_ms is None
            assert self.plain[batch_row] == plain, "who is plain"
            assert self.exports_kv[batch_row] == (sequence.export_lease_ms is not None), (
                "who hands off"
            )

"""What the engine counts of running sequences, in arrays by batch row: a step touches those that need something.

The counts of a sequence always stand in an array, to which its attributes lead (`Count`): one of its own, or from the
moment that it has a batch row a column of `RowCounts.counts`. So there is one place for each number, whoever asks.

These are the engine's. What the thread of the steps knows of the same batch rows is `InputBatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, overload

import numpy as np
from numpy.typing import NDArray

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
COUNTS: Final = 11


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
    """All arrays are `[batch rows]`. What stands at a free batch row means nothing, but for `taken` and `epoch`."""

    def __init__(self, batch_rows: int) -> None:
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
        self.prompt_len = np.zeros(batch_rows, dtype=np.int64)
        self.limit = np.zeros(batch_rows, dtype=np.int64)
        self.link = np.zeros(batch_rows, dtype=np.int64)
        self.request = np.zeros(batch_rows, dtype=np.uint64)
        self.exports_kv = np.zeros(batch_rows, dtype=np.bool_)  # its answer is another worker's
        # A token of it is all that there is to say: it answers here, and the first Output is out.
        self.plain = np.zeros(batch_rows, dtype=np.bool_)
        self.taken = np.zeros(batch_rows, dtype=np.bool_)
        self.epoch = np.zeros(batch_rows, dtype=np.int64)  # counts who had the batch row
        self.sequences = np.empty(batch_rows, dtype=np.object_)
        self.answers = np.empty(batch_rows, dtype=np.object_)  # their `generated`

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
        self.sequences[batch_row], self.answers[batch_row] = sequence, sequence.generated

    def leave(self, sequence: Sequence) -> int:
        """It keeps its counts; returns the batch row that it had, which another may take."""
        batch_row = sequence.batch_row
        assert batch_row is not None and self.sequences[batch_row] is sequence
        sequence.counts = sequence.counts.copy()
        sequence.batch_row = None
        self.taken[batch_row] = False
        self.epoch[batch_row] += 1
        self.sequences[batch_row] = self.answers[batch_row] = None
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

    # --- the same as the properties of a sequence, of many ---

    def length(self, batch_rows: Ints) -> Ints:
        return self.total[batch_rows] + self.pending_tokens[batch_rows]

    def reached(self, batch_rows: Ints) -> Ints:
        return self.computed[batch_rows] + self.pending_rows[batch_rows]

    def remaining(self, batch_rows: Ints) -> Ints:
        return self.length(batch_rows) - self.reached(batch_rows)

    def ends(self, batch_rows: Ints) -> NDArray[np.bool_]:
        return (self.pending_tokens[batch_rows] > 0) & (
            self.length(batch_rows) >= self.limit[batch_rows]
        )

    def check(self) -> None:
        """Assert that the arrays say what the sequences are."""
        for batch_row in range(len(self.taken)):
            sequence: Sequence | None = self.sequences[batch_row]
            assert self.taken[batch_row] == (sequence is not None), "a batch row is taken by nobody"
            if sequence is None:
                assert self.answers[batch_row] is None, "an answer without a sequence"
                continue
            assert sequence.batch_row == batch_row, "a sequence is not where it sits"
            assert np.shares_memory(sequence.counts, self.counts[:, batch_row]), (
                "two places for counts"
            )
            assert self.answers[batch_row] is sequence.generated, "tokens go elsewhere"
            assert self.total[batch_row] == sequence.total, "miscounted tokens"
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

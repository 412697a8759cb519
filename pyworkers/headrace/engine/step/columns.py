"""What the engine counts of the sequences with a seat, in arrays by seat: a step touches those that need something.

The counts of a sequence always stand in an array, to which its attributes lead (`Count`): one of its own, or from the
moment that it has a seat a column of `RowCounts.counts`. So there is one place for each number, whoever asks.

These are the engine's. What the thread of the steps knows of the same seats is `Seats`.
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
COMING_ROWS: Final = 2
COMING_TOKENS: Final = 3
COMING_DRAFTS: Final = 4
DRAFTS: Final = 5
KEYS_FROM: Final = 6
KEYS_TO: Final = 7
PUBLISHED: Final = 8
HELD: Final = 9
TABLED: Final = 10
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
    """All arrays are `[seats]`. What stands at a seat that nobody has means nothing, but for `taken` and `epoch`."""

    def __init__(self, seats: int) -> None:
        self.counts = np.zeros((COUNTS, seats), dtype=np.int64)
        self.total = self.counts[TOTAL]
        self.computed = self.counts[COMPUTED]
        self.coming_rows = self.counts[COMING_ROWS]
        self.coming_tokens = self.counts[COMING_TOKENS]
        self.coming_drafts = self.counts[COMING_DRAFTS]
        self.drafts = self.counts[DRAFTS]
        self.keys_from = self.counts[KEYS_FROM]
        self.keys_to = self.counts[KEYS_TO]
        self.published = self.counts[PUBLISHED]
        self.held = self.counts[HELD]
        self.tabled = self.counts[TABLED]
        self.prompt_len = np.zeros(seats, dtype=np.int64)
        self.limit = np.zeros(seats, dtype=np.int64)
        self.link = np.zeros(seats, dtype=np.int64)
        self.request = np.zeros(seats, dtype=np.uint64)
        self.hands_off = np.zeros(seats, dtype=np.bool_)  # its answer is another worker's
        # A token of it is all that there is to say: it answers here, and the first Output is out.
        self.plain = np.zeros(seats, dtype=np.bool_)
        self.taken = np.zeros(seats, dtype=np.bool_)
        self.epoch = np.zeros(seats, dtype=np.int64)  # counts who had the seat
        self.sequences = np.empty(seats, dtype=np.object_)
        self.answers = np.empty(seats, dtype=np.object_)  # their `generated`

    def take(self, sequence: Sequence, seat: int) -> None:
        """`sequence` has this seat, which nobody had."""
        assert not self.taken[seat] and sequence.seat is None
        self.counts[:, seat] = sequence.counts
        sequence.counts = self.counts[:, seat]
        sequence.seat = seat
        self.prompt_len[seat], self.limit[seat] = sequence.prompt_len, sequence.limit
        self.link[seat], self.request[seat] = sequence.key
        self.hands_off[seat] = sequence.hand_off_ms is not None
        self.plain[seat] = sequence.answered and sequence.hand_off_ms is None
        self.taken[seat] = True
        self.sequences[seat], self.answers[seat] = sequence, sequence.generated

    def leave(self, sequence: Sequence) -> int:
        """It keeps its counts; returns the seat that it had, which another may take."""
        seat = sequence.seat
        assert seat is not None and self.sequences[seat] is sequence
        sequence.counts = sequence.counts.copy()
        sequence.seat = None
        self.taken[seat] = False
        self.epoch[seat] += 1
        self.sequences[seat] = self.answers[seat] = None
        return seat

    def answered(self, sequence: Sequence) -> None:
        """Its first Output goes out."""
        sequence.answered = True
        if sequence.seat is not None:
            self.plain[sequence.seat] = sequence.hand_off_ms is None

    def at(self, seat: int | np.int64) -> Sequence:
        return self.sequences.item(seat)

    def sequences_of(self, seats: Ints) -> list[Sequence]:
        return self.sequences[seats].tolist()

    # --- the same as the properties of a sequence, of many ---

    def length(self, seats: Ints) -> Ints:
        return self.total[seats] + self.coming_tokens[seats]

    def reached(self, seats: Ints) -> Ints:
        return self.computed[seats] + self.coming_rows[seats]

    def remaining(self, seats: Ints) -> Ints:
        return self.length(seats) - self.reached(seats)

    def ends(self, seats: Ints) -> NDArray[np.bool_]:
        return (self.coming_tokens[seats] > 0) & (self.length(seats) >= self.limit[seats])

    def check(self) -> None:
        """Assert that the arrays say what the sequences are."""
        for seat in range(len(self.taken)):
            sequence: Sequence | None = self.sequences[seat]
            assert self.taken[seat] == (sequence is not None), "a seat is taken by nobody"
            if sequence is None:
                assert self.answers[seat] is None, "an answer without a sequence"
                continue
            assert sequence.seat == seat, "a sequence is not where it sits"
            assert np.shares_memory(sequence.counts, self.counts[:, seat]), "two places for counts"
            assert self.answers[seat] is sequence.generated, "tokens go elsewhere"
            assert self.total[seat] == sequence.total, "miscounted tokens"
            assert sequence.held == len(sequence.blocks), "miscounted blocks"
            assert sequence.tabled <= sequence.held, "a table of more than there is"
            assert sequence.key == (self.link[seat], int(self.request[seat])), "another's key"
            assert self.prompt_len[seat] == sequence.prompt_len, "another's prompt"
            assert self.limit[seat] == sequence.limit, "another's limit"
            plain = sequence.answered and sequence.hand_off_ms is None
            assert self.plain[seat] == plain, "who is plain"
            assert self.hands_off[seat] == (sequence.hand_off_ms is not None), "who hands off"

"""Answers that follow rules, a grammar or the end of reasoning: a token that they do not allow is never chosen.

The mask of a step depends on the tokens before it, which are known when its forward pass begins. So `begin` goes
before the pass and `StepMasks.apply` behind it, and a thread of `_core` fills the masks in between. Where an answer
stands in its rules follows from its tokens alone: whoever takes a batch row brings those that there are, be it after
a preemption, on another worker, or after the first token of a hand-off.

A draft is checked by the mask of its place like any other token. Behind one that ends the answer nothing is chosen, so
that the answer ends there.

A step does not wait for all masks, however much work they are. Whoever has none in time is put off: it gets no token,
and computes the row of its newest token again in the next step. Its text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.sampling.logits import Few, Logits
from headrace.engine.sampling.verify import GOES_ON, LENGTH, STOP
from headrace.engine.step.rows import places_of, spread

if TYPE_CHECKING:
    from headrace.engine.sampling.sampler import Rows
    from headrace.engine.sampling.verify import ChosenRows
    from headrace.engine.step.input_batch import AddedRow

Ints = NDArray[np.int64]

WORK_BESIDE = 1 << 21  # of a step's masks while its model computes, in units of some 70 ns: 150 ms
WORK_LATE = (
    140_000  # and once it waits for them: 10 ms, the time of a step of a large model. A guess
)


class Grammars:
    """Where the answers with rules stand, by batch row. Belongs to the thread of the steps."""

    def __init__(self, vocab_size: int, max_sequences: int) -> None:
        self._core = _core.GrammarRows(
            vocab_size, max_sequences, work_beside=WORK_BESIDE, work_late=WORK_LATE
        )
        self._has = np.zeros(max_sequences, dtype=np.bool_)
        self._any = False

    def take_row(self, added: AddedRow) -> None:
        """Another sequence has a batch row."""
        batch_row, rules = added.batch_row, added.sequence.rules
        if rules is not None:
            self._core.take(batch_row, rules, added.generated)
        elif self._has[batch_row]:
            self._core.leave(batch_row)
        else:
            return
        self._has[batch_row] = rules is not None
        self._any = bool(self._has.any())

    def leave_rows(self, batch_rows: Ints) -> None:
        """The answers there have ended, and need no memory any more."""
        for row in batch_rows[self._has[batch_rows]].tolist():
            self._core.leave(row)
            self._has[row] = False
        self._any = bool(self._has.any())

    def begin(self, rows: Rows) -> StepMasks | None:
        """Have the masks of these rows filled, for those with rules; `None` where nobody has any."""
        if not self._any:
            return None
        owners = places_of(self._has[rows.batch_rows])
        if not len(owners):
            return None
        counts = rows.counts[owners]
        places = spread(rows.starts[owners], counts)
        self._core.begin(rows.batch_rows[owners], counts, rows.drafts[places])
        return StepMasks(self._core, owners, places)

    def count_allowed(self, batch_rows: Ints, drafts: Ints, made: Ints) -> Ints:
        """How many of the first `made` of these drafts, `[rows, most]`, may be checked at all: not those that rules
        do not allow, nor those behind them.
        """
        owners = places_of(self._has[batch_rows]) if self._any else np.zeros(0, dtype=np.int64)
        if not len(owners):
            return made
        counts = made[owners]
        listed = drafts[owners][np.arange(drafts.shape[1]) < counts[:, None]]
        allowed = made.copy()
        allowed[owners] = self._core.count_allowed(batch_rows[owners], counts, listed)
        return allowed

    def times(self) -> tuple[int, int, int, int, int]:
        """Masks so far, microseconds of the thread, steps that waited for it, and for how many microseconds; and
        answers that were put off, once for each step.
        """
        return self._core.times()


@dataclass(slots=True)
class StepMasks:
    """Of one step. `apply` it once, then `advance`."""

    _core: _core.GrammarRows
    _owners: Ints  # places of the sequences
    _places: Ints  # [masks], rows of the logits
    put_off: Ints = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64)
    )  # once applied: places of sequences

    def apply(self, logits: Logits, *, whole: bool) -> Few | None:
        """What a grammar does not allow becomes -inf, in place; all of a row in which nothing may be chosen.

        But on the host, and unless it has to be done in the `whole` array, rows in which few tokens may be chosen stay
        as they are: to look at those tokens alone costs next to nothing, to write all others costs a row.
        """
        masks, starts, ids, put_off = self._core.masks()
        self.put_off = self._owners[put_off]
        if whole or not logits.on_host:
            logits.mask(self._places, masks)
            return None
        listed = starts[1:] > starts[:-1]
        if not listed.all():
            written = places_of(~listed)
            logits.mask(self._places[written], masks[written])
        of = np.full(logits.rows, -1, dtype=np.int64)
        lists = places_of(listed)
        of[self._places[lists]] = lists
        return Few(of, starts, ids)

    def advance(self, chosen: ChosenRows, batch_rows: Ints, ended: NDArray[np.bool_]) -> None:
        """The sequences have these tokens more. An answer that its grammar has finished ends, and so says `ended`."""
        owners = self._owners
        counts = chosen.counts[owners]
        starts = (chosen.counts.cumsum() - chosen.counts)[owners]
        ids = chosen.ids[spread(starts, counts)]
        finished = owners[self._core.advance(batch_rows[owners], counts, ids)]
        for row in finished.tolist():
            if chosen.finish[row] in (GOES_ON, LENGTH):
                chosen.finish[row] = STOP
                ended[batch_rows[row]] = True

    def note_stuck(self, chosen: ChosenRows, rows: Rows, best: NDArray[np.float32]) -> None:
        """Say why of the answers that got no token since no token may go on; `best` are the highest logits left."""
        none = np.setdiff1d(self._owners[chosen.counts[self._owners] == 0], self.put_off)
        for row in none[np.isneginf(best[rows.starts[none]])].tolist():
            text = self._core.error(rows.batch_rows.item(row))
            chosen.stuck[row] = text or "the request forbids all tokens that may come next"

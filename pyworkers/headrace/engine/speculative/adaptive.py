"""How many tokens to draft for each sequence: as many as bring more tokens per ms.

What a draft brings is the chance that it is accepted, and all before it (`acceptance.py`). What it costs is one more
row of the next forward pass, and its share of the drafting passes; both are learnt from the engine's own steps, the
former for each size of batch by itself, as the first rows come almost for free and later ones do not. The drafts that
are most likely to be right are taken first, up to the number at which tokens per ms are highest, which is none at all
where a step's time grows with each row. So it is decided who drafts, by what is known of the sequences; and then,
after each draft, who goes on, by how sure the drafting layer was of it.

The first steps of a size draft all and nothing in turns, and now and then a step does otherwise, so that a rate, or a
cost, that was wrong or has changed is found out: for a few of the sequences only, as a few more rows are enough to
learn what one costs. Tokens never depend on any of this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.speculative.acceptance import Acceptance
from headrace.engine.speculative.row_cost import RowCost

# Of the ms of a row that another row takes; no less, or large batches draft at first.
FORWARD_SHARE = 1 / 2
PASS_SHARE = 1 / 8  # of a drafting pass, whose weights are most of it
UNTRIED = 2  # first steps of a size, which touch new memory
TRIES = 4  # steps after them, of which every other one drafts
MARGIN = 1.03  # drafting has to be better by this
PATIENCE = 8  # steps without a draft for which the drafting layer is kept up to date
NEW = -1  # instead of their number: no step yet
REVIEW_EVERY = 4  # steps: how many to draft; a lone sequence that drafts nothing asks in each
YOUNG = 64  # steps of a size in which costs are uncertain: what is drafted is reviewed in each
PROBE_SOON = 2  # steps after drafting began; twice as many after each probe
PROBE_REST = 16  # steps for each sequence after it ended, up to the next; twice as many after each that found nothing
PROBE_EVERY = 64  # while it goes on
PROBE_AT_MOST_EVERY = 1024
TRIED = 8  # of so many sequences, one drafts in a step that only tries
# These are guesses.


class _Size:
    """What is known of batches of about one size."""

    def __init__(self, each: float) -> None:
        self.forward = RowCost(FORWARD_SHARE, each)
        self.speed = 0.0  # tokens per ms, as expected at the last review
        self.turns = 0
        self.gap = PROBE_SOON
        self.probe_at = UNTRIED + TRIES + PROBE_SOON
        self.pays = True  # to draft, as far as was known last; or nothing was chosen yet

    def chose(self, sequences: int, *, pays: bool) -> None:
        """What begins to draft for all, after trying it with a few, is soon to do without for a step."""
        if pays != self.pays:
            rest = min(PROBE_REST * sequences, PROBE_EVERY)
            self.gap = PROBE_SOON if pays else rest
            self.probe_at = self.turns + self.gap
        self.pays = pays


class Adaptive:
    """What drafts of the running sequences, by batch row, bring, and what rows cost."""

    def __init__(self, most: int, max_sequences: int) -> None:
        self.most = most
        # Of a drafting pass, by the sequences that it drafts for.
        self.passes = RowCost(PASS_SHARE)
        self.acceptance = Acceptance(most, max_sequences)
        self._idle = np.zeros(max_sequences, dtype=np.int64)  # steps without a draft
        self._draws = np.zeros(max_sequences, dtype=np.bool_)  # drafts, as was last reviewed
        self._due = True  # a review, as others draft now
        self._exact = True  # what was chosen last is drafted whatever the drafts are, as it shall tell what it costs
        self._sizes: dict[int, _Size] = {}  # by the bits of the number of sequences
        self._size = self._of_size(1)

    @property
    def forward(self) -> RowCost:
        """Of the rows of a step that only decodes, for those that the last choice was for."""
        return self._size.forward

    def take_row(self, batch_row: int) -> None:
        """Another sequence has this batch row."""
        self.acceptance.take_row(batch_row)
        self._draws[batch_row] = False
        self._due = True
        self._idle[batch_row] = NEW

    def goes_on(
        self, batch_rows: NDArray[np.int64], depth: int, probability: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether another draft is worth it for each that has one at `depth`, from 1, of this probability."""
        chances = self.acceptance.drawn(batch_rows, depth, probability)
        goes = np.ones(len(batch_rows), dtype=np.bool_)
        if self._exact:
            return goes
        gains = chances * self.acceptance.rates[batch_rows, depth]
        order = (-gains).argsort(kind="stable")
        count = np.arange(1.0, len(batch_rows) + 1)
        ms = self.passes.at(count) + self.forward.each * count
        surplus = gains[order].cumsum() - self._size.speed * ms
        best = int(surplus.argmax())
        goes[order[best + 1 if surplus[best] > 0 else 0 :]] = False
        return goes

    def choose(self, batch_rows: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens to draft for each, `most` at the utmost, as long as it `goes_on`."""
        most = np.minimum(most, self.most)
        size = self._of_size(len(batch_rows))
        self._due |= size is not self._size
        self._size = size
        room = bool(most.any())  # otherwise the step tells nothing of what pays
        size.turns += room
        tries = self._exact = size.turns <= UNTRIED + TRIES
        drafts = np.zeros(len(batch_rows), dtype=np.int64)
        if tries:  # find out what rows cost
            if size.turns > UNTRIED and size.turns % 2:
                some = self._some(batch_rows)
                drafts[some] = most[some]
        elif room:
            drafts = np.where(self._chosen(size, batch_rows, most), most, 0)
            size.chose(len(batch_rows), pays=bool(drafts.any()))
            if size.turns >= size.probe_at:
                self._exact = True
                drafts = self._probe(batch_rows, drafts, most)
        idle = self._idle[batch_rows]
        # The first step of a sequence decides whether the layer follows it, and its prompt. As long as nothing is known
        # it does that once: blocks of prompts are shared for long, and drafts lack what they have no keys of.
        if tries and room:
            idle[idle == NEW] = PATIENCE - 1
        elif not room or not size.pays:
            idle[idle == NEW] = PATIENCE
        self._idle[batch_rows] = np.where(drafts > 0, 0, idle + 1)
        return drafts

    def _chosen(
        self, size: _Size, batch_rows: NDArray[np.int64], most: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Who drafts: the best, or for some steps what was."""
        every = REVIEW_EVERY if size.pays else max(min(REVIEW_EVERY, len(batch_rows)), 1)
        if size.pays and size.turns <= YOUNG:
            every = 1
        if size.turns % every == 0 or (self._due and size.pays):
            self._due = False
            rest = batch_rows[~self._draws[batch_rows]]
            if len(rest):
                self.acceptance.rested(rest, every)
            self._draws[batch_rows] = self._best(batch_rows, most)
        elif not size.pays:
            return np.zeros(len(batch_rows), dtype=np.bool_)
        return self._draws[batch_rows]

    def keeps_up(self, batch_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the drafting layer follows these sequences: they draft, or did a while ago."""
        return self._idle[batch_rows] <= PATIENCE

    def _of_size(self, sequences: int) -> _Size:
        key = sequences.bit_length()
        if key not in self._sizes:
            near = min(self._sizes, key=lambda other: abs(other - key), default=None)
            each = 0.0 if near is None else self._sizes[near].forward.each
            self._sizes[key] = _Size(each)
        return self._sizes[key]

    def _some(self, batch_rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of the few that try something: who did not draft for longest."""
        return np.argsort(-self._idle[batch_rows], kind="stable")[: -(-len(batch_rows) // TRIED)]

    def _best(self, batch_rows: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.bool_]:
        count = len(batch_rows)
        gains = self.acceptance.rates[batch_rows].cumprod(axis=1)  # [sequences, most]
        gains[np.arange(self.most) >= most[:, None]] = -1
        order = (-gains).ravel().argsort(kind="stable")[: np.count_nonzero(gains >= 0)]
        depths = order % self.most
        tokens = count + np.cumsum(gains.ravel()[order])
        ms = self.forward.at(count + np.arange(1.0, len(order) + 1))
        for depth in range(self.most):
            drafting = np.cumsum(depths == depth)
            ms = ms + np.where(drafting > 0, self.passes.at(drafting.astype(np.float64)), 0)
        draws = np.zeros(count, dtype=np.bool_)
        if not len(order):
            return draws
        speed = tokens / np.maximum(ms, 1e-9)
        best = int(speed.argmax())
        without = count / max(self.forward.at(count), 1e-9)
        self._size.speed = max(float(speed[best]), without)
        spent = ms[best]
        if not self._draws[batch_rows].any():
            # What begins has to pay even if rows cost more than they seem to.
            spent += self.forward.doubt * (best + 1)
        if tokens[best] > MARGIN * without * spent:
            draws[order[: best + 1] // self.most] = True
        return draws

    def _probe(
        self, batch_rows: NDArray[np.int64], drafts: NDArray[np.int64], most: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Something else than `drafts`, for one step: fewer where there are many, for a few where there were none."""
        size = self._size
        size.gap = min(size.gap * 2, PROBE_EVERY if size.pays else PROBE_AT_MOST_EVERY)
        size.probe_at = size.turns + size.gap
        drafts = np.minimum(drafts, size.turns // PROBE_EVERY % self.most)
        some = self._some(batch_rows)
        some = some[self._idle[batch_rows[some]] > 0]
        drafts[some] = np.minimum(most[some], 1) if size.pays else most[some]
        return drafts

"""Guesses at the next tokens, by the module that the model has for it.

The row of position j takes token j and the main hidden state of position j - 1, and guesses token j + 1. After each
forward pass one drafting pass covers the rows of all tokens that it made known, the newest one too; then each further
pass goes on from the guess of the pass before, one row a sequence. Rows on guesses are written over by the next pass
over known tokens, and no row sees keys behind its own position, so nothing is ever read that is not true.

The hidden state before a step's first row is in the tail of its block, unless rows of later tokens were in that block.
Where it is gone, or drafting was off for a while, the keys have a hole: `InputBatch.keys_from` moves behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling import topk
from headrace.engine.sampling.sampler import Rows, Sampler
from headrace.engine.speculative.adaptive import Adaptive
from headrace.engine.speculative.draft_head import DraftHead
from headrace.engine.speculative.rejection import Rejection
from headrace.engine.step.batch_builder import Prepared
from headrace.engine.step.input_batch import InputBatch, Ints
from headrace.engine.step.rows import places_of, spread
from headrace.engine.step.work import StepWork
from headrace_kernels.batch import DraftBatch

if TYPE_CHECKING:
    from headrace.models import Model


@dataclass(slots=True)
class _Known:
    """Rows of known tokens, sequence by sequence, and how many tokens to draft from each one's last row."""

    sequences: NDArray[np.object_]  # `Sequence`
    batch_rows: Ints
    starts: Ints  # the first position
    stops: Ints  # behind the last one
    tokens: NDArray[np.int32]  # [rows]
    hidden_from: NDArray[np.int32]  # [rows]
    keys_from: Ints
    drafts: Ints


class Drafter:
    """Drafts for the sequences with a batch row. `rejection` is told what drafts were drawn from."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        input_batch: InputBatch,
        adaptive: Adaptive | None,
        rejection: Rejection | None,
        *,
        head: DraftHead,
        most: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._input_batch = input_batch
        self._adaptive = adaptive  # None: as many as possible, always
        self._rejection = rejection
        self._head = head
        self._most = most
        self._clock = clock
        self.first = most  # how many a sequence that comes with its KV may draft

    def begin(self, work: StepWork) -> None:
        """Draft for sequences that just took their batch row with all their KV, from the tails of their blocks."""
        if not work.begins.any():
            return
        input_batch, some = self._input_batch, work.where(work.begins)
        of = some.batch_rows
        starts = input_batch.computed[of]
        known = _Known(
            some.sequences,
            of,
            starts,
            starts + 1,
            input_batch.newest[of],
            (-1 - input_batch.blocks(of, starts - 1)).astype(np.int32),
            input_batch.keys_from[of],
            some.drafts,
        )
        self._draft(known)

    def follow(self, step: Prepared) -> bool:
        """Cover what a step computed, and draft for the next one. Returns whether the device may still write.

        What is known of the batch rows is what the step left.
        """
        input_batch, batch, of = self._input_batch, step.batch, step.batch_rows
        after, totals = input_batch.computed[of], input_batch.total[of]
        room = input_batch.room(of)
        live = ~input_batch.ended[of]
        answered = totals > input_batch.prompt_len[of]
        decodes = live & input_batch.answers[of] & answered & (totals - after == 1)
        most = np.minimum(np.minimum(input_batch.limit[of] - totals - 1, room - after), self._most)
        drafts = np.zeros(len(of), dtype=np.int64)
        places = places_of(decodes)
        follows = np.ones(len(of), dtype=np.bool_)
        if self._adaptive is None:
            drafts[places] = np.maximum(most[places], 0)
        elif len(places):
            drafts[places] = self._adaptive.choose(of[places], np.maximum(most[places], 0))
            follows[places] = self._adaptive.keeps_up(of[places])
            self.first = -(-int(drafts.sum()) // len(places))
            if not follows.any():
                return False  # most steps of large batches: they should cost nothing for it

        rows = batch.seq_starts[:-1].astype(np.int64)
        before = batch.positions[rows].astype(np.int64)
        stops = after + (live & (totals > after) & (room > after))
        keys_from, keys_to = input_batch.keys_from[of], input_batch.keys_to[of]
        aligned = (keys_to == before) & (before % input_batch.block_tokens == 0) & (before > 0)
        starts = np.where(aligned, before, before + 1)
        hole = keys_to < starts
        keys_from[hole] = starts[hole]
        chosen = places_of(follows & (stops > starts))
        if not len(chosen):
            return False

        owners = chosen.repeat((stops - starts)[chosen])
        positions = spread(starts[chosen], (stops - starts)[chosen])
        row_of = rows[owners] + positions - before[owners]  # of the same token in the batch
        tokens = batch.tokens[np.minimum(row_of, batch.rows - 1)]
        unseen = places_of(positions == after[owners])  # tokens that the step did not compute
        tokens[unseen] = input_batch.newest[of[owners[unseen]]]
        in_prompt = ~answered | (totals - after > 1)
        for row in unseen[in_prompt[owners[unseen]]].tolist():
            place, end = owners[row], int(positions[row])
            tokens[row] = step.work.sequence(int(place)).tokens(end, end + 1)[0]
        tails = input_batch.blocks(of[owners], np.maximum(before[owners] - 1, 0))
        hidden_from = np.where(positions == before[owners], -1 - tails, row_of - 1)
        return not self._draft(
            _Known(
                step.work.sequences[chosen],
                of[chosen],
                starts[chosen],
                stops[chosen],
                tokens,
                hidden_from.astype(np.int32),
                keys_from[chosen],
                drafts[chosen],
            )
        )

    def _draft(self, known: _Known) -> bool:
        """All passes. Returns whether the last one's logits were read."""
        counts = known.stops - known.starts
        last_rows = counts.cumsum() - 1
        input_batch = self._input_batch
        input_batch.keys_from[known.batch_rows], input_batch.keys_to[known.batch_rows] = (
            known.keys_from,
            known.stops,
        )
        drafting = places_of(known.drafts > 0)
        began_s = self._clock()
        logits = self._model.draft(
            self._batch(
                known.batch_rows,
                spread(known.starts, counts),
                counts,
                known.tokens,
                known.hidden_from,
                known.keys_from,
                logit_rows=last_rows[drafting],
                chained=False,
            )
        )
        guesses = np.zeros((len(drafting), self._most + 1), dtype=np.int64)
        made = np.zeros(len(drafting), dtype=np.int64)
        totals = input_batch.total[known.batch_rows[drafting]]
        depth, hidden_from = 1, last_rows[drafting]
        going = np.arange(len(drafting))  # places in `drafting`
        prompts = int(counts.max()) > self._most + 1
        while len(going):
            some = drafting[going]
            rows = Rows(
                known.sequences[some].tolist(),
                known.batch_rows[some],
                totals[going],
                np.full(len(some), depth),
                guesses[going, :depth].ravel().astype(np.int32),
            )
            guesses[going, depth] = self._sampler.draft(logits, rows, self._head)
            if self._rejection is not None:
                self._rejection.drafted(logits, rows)
            now_s = self._clock()
            if self._adaptive is not None and not (prompts and depth == 1):
                computed = len(known.batch_rows) if depth == 1 else len(going)
                self._adaptive.passes.note(computed, (now_s - began_s) * 1e3)
            made[going] = depth
            more = places_of(known.drafts[some] > depth)
            if self._adaptive is not None and len(more):
                places = drafting[going[more]]
                columns = self._head.columns_of(guesses[going[more], depth])
                sure = topk.probability(logits, more, columns)
                more = more[self._adaptive.goes_on(known.batch_rows[places], depth, sure)]
            hidden_from = hidden_from[more] if depth == 1 else more
            going = going[more]
            if not len(going):
                break
            some = drafting[going]
            began_s = now_s
            logits = self._model.draft(
                self._batch(
                    known.batch_rows[some],
                    known.stops[some] + depth - 1,
                    np.ones(len(some), dtype=np.int64),
                    guesses[going, depth].astype(np.int32),
                    hidden_from.astype(np.int32),
                    known.keys_from[some],
                    logit_rows=np.arange(len(some)),
                    chained=True,
                )
            )
            depth += 1
        input_batch.drafts[known.batch_rows[drafting], : self._most] = guesses[:, 1:]
        input_batch.drafted[known.batch_rows[drafting]] = made
        return len(drafting) > 0

    def _batch(
        self,
        batch_rows: Ints,
        positions: Ints,
        counts: Ints,
        tokens: NDArray[np.int32],
        hidden_from: NDArray[np.int32],
        keys_from: Ints,
        *,
        logit_rows: Ints,
        chained: bool,
    ) -> DraftBatch:
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        counts.cumsum(out=starts[1:])
        ends = positions[starts[1:] - 1] + 1
        return DraftBatch(
            tokens=tokens,
            positions=positions.astype(np.int32),
            slots=self._input_batch.slots(batch_rows.repeat(counts), positions),
            seq_starts=starts,
            context_lens=ends.astype(np.int32),
            block_tables=self._input_batch.tables(batch_rows, int(ends.max())),
            logit_rows=logit_rows.astype(np.int32),
            hidden_from=hidden_from,
            first_keys=keys_from.astype(np.int32),
            chained=chained,
        )

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

from headrace.engine.sampling.grammar import Grammars
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits import Logits
from headrace.engine.sampling.sampler import Rows, Sampler
from headrace.engine.speculative.adaptive import Adaptive
from headrace.engine.speculative.draft_head import DraftHead
from headrace.engine.speculative.rejection import Rejection
from headrace.engine.step.batch_builder import Prepared
from headrace.engine.step.input_batch import InputBatch, Ints
from headrace.engine.step.rounds import Rounds
from headrace.engine.step.rows import places_of
from headrace.engine.step.work import StepWork
from headrace_kernels.batch import DraftBatch

if TYPE_CHECKING:
    from headrace.models import Model


@dataclass(slots=True)
class _Known:
    """A pass over known tokens, and how many tokens to draft from the last row of each of its sequences."""

    sequences: NDArray[np.object_]  # `Sequence`
    batch_rows: Ints
    stops: Ints  # behind the last position of each
    drafts: Ints
    batch: DraftBatch
    drafting: Ints  # places of those with drafts


class Drafter:
    """Drafts for the sequences with a batch row. `rejection` is told what drafts were drawn from.

    With `rounds` other ranks run as many passes at the same time: those that this rank has no rows for are empty.
    """

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
        rounds: Rounds | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        # Whoever checks by rejection needs all drafts that were drawn, whatever a grammar says of them.
        self._grammars = grammars if rejection is None else None
        self._rounds = rounds
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
            if self._rounds is not None and self._rounds.drafts_first:
                self._run(None, last=False)
            return
        input_batch, some = self._input_batch, work.where(work.begins)
        of = some.batch_rows
        starts = input_batch.computed[of]
        stops = starts + 1
        input_batch.keys_to[of] = stops
        known = self._known(
            some.sequences,
            of,
            stops,
            some.drafts,
            input_batch.core.draft_rows(of, starts, stops),
            tokens=input_batch.newest[of],
            hidden_from=(-1 - input_batch.blocks(of, starts - 1)).astype(np.int32),
            first_keys=input_batch.keys_from[of].astype(np.int32),
        )
        self._run(known, last=False)

    def follow(self, step: Prepared) -> bool:
        """Cover what a step computed, and draft for the next one. Returns whether the device may still write.

        What is known of the batch rows is what the step left.
        """
        return self._run(self._known_of(step), last=True)

    def _known_of(self, step: Prepared) -> _Known | None:
        """The pass over what a step made known, if there is to be one."""
        core, batch, of = self._input_batch.core, step.batch, step.work.batch_rows
        places, most = core.drafting(of, self._most)
        follows = None
        if self._adaptive is not None and len(places):
            most = self._adaptive.choose(of[places], most)
            follows = np.ones(len(of), dtype=np.bool_)
            follows[places] = self._adaptive.keeps_up(of[places])
            self.first = -(-int(most.sum()) // len(places))
            if not follows.any():
                return None  # most steps of large batches: they should cost nothing for it
        drafts = most
        if len(places) < len(of):
            drafts = np.zeros(len(of), dtype=np.int64)
            drafts[places] = most
        chosen, batch_rows, stops, drafts, rows, tokens, hidden_from, first_keys, unknown = (
            core.follow(
                of,
                seq_starts=batch.seq_starts,
                positions=batch.positions,
                tokens=batch.tokens,
                drafts=drafts,
                follows=follows,
            )
        )
        if not len(chosen):
            return None
        for row, place, position in unknown:  # of a prompt
            tokens[row] = step.work.sequence(place).tokens(position, position + 1)[0]
        return self._known(
            step.work.sequences_at(chosen),
            batch_rows,
            stops,
            drafts,
            rows,
            tokens=tokens,
            hidden_from=hidden_from,
            first_keys=first_keys,
        )

    def _known(
        self,
        sequences: NDArray[np.object_],
        batch_rows: Ints,
        stops: Ints,
        drafts: Ints,
        rows: tuple[
            NDArray[np.int32], Ints, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]
        ],
        *,
        tokens: NDArray[np.int32],
        hidden_from: NDArray[np.int32],
        first_keys: NDArray[np.int32],
    ) -> _Known:
        drafting = drafts.nonzero()[0]
        last_rows = rows[2][1:] - 1
        if len(drafting) < len(drafts):
            last_rows = last_rows[drafting]
        batch = _batch(rows, tokens, hidden_from, first_keys, logit_rows=last_rows, chained=False)
        return _Known(sequences, batch_rows, stops, drafts, batch, drafting)

    def _run(self, known: _Known | None, *, last: bool) -> bool:
        """All passes, here and on other ranks. Returns whether the device may still write.

        The `last` ones of a step are those that follow its forward pass.
        """
        rounds = self._rounds
        if rounds is None:
            return known is not None and not self._draft(known)
        most = 0 if known is None else max(1, int(known.drafts.max()))
        rounds.agree_passes(most, last=last)
        unread = known is not None and not self._draft(known)
        rounds.run_rest()
        return unread

    def _pass(self, batch: DraftBatch) -> Logits:
        draft = self._model.draft if self._rounds is None else self._rounds.draft
        return logits_of(draft(batch))

    def _draft(self, known: _Known) -> bool:
        """The passes of this rank. Returns whether the last one's logits were read."""
        input_batch, adaptive = self._input_batch, self._adaptive
        drafting = known.drafting
        sequences, batch_rows, stops = known.sequences, known.batch_rows, known.stops
        drafts, first_keys, hidden_from = (
            known.drafts,
            known.batch.first_keys,
            known.batch.logit_rows,
        )
        prompts = adaptive is not None and (
            int(np.diff(known.batch.seq_starts).max()) > self._most + 1
        )
        began_s = self._clock()
        logits = self._pass(known.batch)
        if not len(drafting):
            return False
        if len(drafting) < len(batch_rows):
            sequences, batch_rows, stops = (
                sequences[drafting],
                batch_rows[drafting],
                stops[drafting],
            )
            drafts, first_keys = drafts[drafting], first_keys[drafting]
        count, depth = len(drafting), 1
        guesses = np.zeros((count, self._most), dtype=np.int64)
        made = np.ones(count, dtype=np.int64)
        going = np.arange(count)  # places in `drafting`
        best = self._rejection is None and self._sampler.takes_best(batch_rows)
        totals = None if best else input_batch.total[batch_rows]
        while True:
            if totals is None:
                ids = self._head.ids_of(logits.argmax()[0])
            else:
                rows = Rows(
                    sequences[going],
                    batch_rows[going],
                    totals[going],
                    np.full(len(going), depth),
                    _after_newest(guesses[going, : depth - 1]),
                )
                ids = self._sampler.draft(logits, rows, self._head)
                if self._rejection is not None:
                    self._rejection.drafted(logits, rows)
            guesses[going, depth - 1] = ids
            now_s = self._clock()
            if adaptive is not None and not (prompts and depth == 1):
                computed = len(known.batch_rows) if depth == 1 else len(going)
                adaptive.passes.note(computed, (now_s - began_s) * 1e3)
            if depth == self._most:
                break
            more = places_of(drafts[going] > depth)
            if adaptive is not None and len(more):
                places = going[more]
                columns = self._head.columns_of(guesses[places, depth - 1])
                sure = logits.probability(more, columns)
                more = more[adaptive.goes_on(batch_rows[places], depth, sure)]
            hidden_from = hidden_from[more] if depth == 1 else more.astype(np.int32)
            going = going[more]
            if not len(going):
                break
            began_s = now_s
            starts = stops[going] + depth - 1
            logits = self._pass(
                _batch(
                    input_batch.core.draft_rows(batch_rows[going], starts, starts + 1),
                    guesses[going, depth - 1].astype(np.int32),
                    hidden_from,
                    first_keys[going],
                    logit_rows=np.arange(len(going), dtype=np.int32),
                    chained=True,
                )
            )
            depth += 1
            made[going] = depth
        if self._grammars is not None:
            made = self._grammars.count_allowed(batch_rows, guesses, made)
        input_batch.core.keep_drafts(batch_rows, guesses, made)
        return True


def _batch(
    rows: tuple[NDArray[np.int32], Ints, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]],
    tokens: NDArray[np.int32],
    hidden_from: NDArray[np.int32],
    first_keys: NDArray[np.int32],
    *,
    logit_rows: NDArray[np.int32],
    chained: bool,
) -> DraftBatch:
    positions, slots, seq_starts, context_lens, block_tables = rows
    return DraftBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        seq_starts=seq_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        logit_rows=logit_rows,
        hidden_from=hidden_from,
        first_keys=first_keys,
        chained=chained,
    )


def _after_newest(guesses: NDArray[np.int64]) -> NDArray[np.int32]:
    """`Rows.drafts` of sequences with these guesses: before them stands one that means nothing."""
    drafts = np.zeros((len(guesses), guesses.shape[1] + 1), dtype=np.int32)
    drafts[:, 1:] = guesses
    return drafts.ravel()

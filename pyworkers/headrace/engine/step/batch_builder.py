"""Turns the work of a step into the arrays that a model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.step.input_batch import InputBatch
from headrace.engine.step.rows import places_of, spread
from headrace.engine.step.work import StepWork, Work
from headrace_kernels.batch import Batch


@dataclass(slots=True)
class Prepared:
    """A batch, and whose logits come back: those of `sampled` first, then the rows of `prompt_rows`.

    Of a sampled sequence come the row of its newest token and those of its drafts, `sampled_rows[i]` in all.
    """

    batch: Batch
    work: StepWork
    batch_rows: NDArray[np.int64]  # [work]
    known: NDArray[np.int64]  # [work], rows but for drafts
    sampled: NDArray[np.int64]  # places in `work`
    sampled_rows: NDArray[np.int64]  # [sampled]
    prompt_rows: list[tuple[Work, NDArray[np.int32]]]  # with the token that each row predicts


def build(
    input_batch: InputBatch, work: StepWork, newest_of: torch.Tensor | None = None
) -> Prepared:
    """For sequences that have not ended. With `newest_of` their newest tokens are there, by batch row."""
    count = len(work)
    of, known = work.batch_rows, work.counts
    first, total = input_batch.computed[of], input_batch.total[of]
    prompt_lens = input_batch.prompt_len[of]
    stop = first + known
    newest = (known == 1) & (stop == total) & (total > prompt_lens)  # its token is in `batch rows`
    drafts = np.where(newest, np.minimum(work.drafts, input_batch.drafted[of]), 0)
    counts = known + drafts
    starts = np.zeros(count + 1, dtype=np.int64)
    counts.cumsum(out=starts[1:])
    batch_row_of_rows, positions, newest_rows, offsets = of, first, newest, starts[:0]
    if starts[-1] > count:  # not a row each, as most steps have
        owners = np.arange(count).repeat(counts)
        offsets = np.arange(starts[-1]) - starts[owners]
        batch_row_of_rows, positions, newest_rows = (
            of[owners],
            first[owners] + offsets,
            newest[owners],
        )

    tokens = input_batch.newest[batch_row_of_rows]
    if newest_of is not None:
        tokens = np.where(newest_rows, -1 - batch_row_of_rows, tokens).astype(np.int32)
    if drafts.any():
        guessed = places_of(newest_rows & (offsets > 0))
        tokens[guessed] = input_batch.drafts[batch_row_of_rows[guessed], offsets[guessed] - 1]
    for place in places_of(~newest).tolist():
        chunk = work.sequence(place).tokens(int(first[place]), int(stop[place]))
        tokens[starts[place] : starts[place + 1]] = chunk

    sampled = places_of((stop == total) & (total < input_batch.limit[of]))
    sampled_rows = 1 + drafts[sampled]
    logit_rows = [spread(starts[sampled] + known[sampled] - 1, sampled_rows)]
    prompt_rows: list[tuple[Work, NDArray[np.int32]]] = []
    for place in places_of(work.scores).tolist():
        item = work[place]
        begin, row = int(first[place]), int(starts[place])
        targets = item.sequence.prompt[begin + 1 : begin + item.count + 1]
        prompt_rows.append((item, targets))
        logit_rows.append(np.arange(row, row + len(targets)))
    context_lens = first + counts
    batch = Batch(
        tokens=tokens,
        positions=positions.astype(np.int32),
        slots=input_batch.slots(batch_row_of_rows, positions),
        seq_starts=starts.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=input_batch.tables(of, int(context_lens.max())),
        logit_rows=np.concatenate(logit_rows).astype(np.int32),
        prompt_lens=prompt_lens.astype(np.int32),
        newest=newest_of,
    )
    return Prepared(batch, work, of, known, sampled, sampled_rows, prompt_rows)

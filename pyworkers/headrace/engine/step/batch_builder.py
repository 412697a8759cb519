"""Turns the work of a step into the arrays that a model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pooling import Floats
from headrace.engine.sampling.sampler import Rows
from headrace.engine.step.input_batch import InputBatch
from headrace.engine.step.work import StepWork, Work
from headrace_kernels.batch import Batch

if TYPE_CHECKING:
    import torch

    from headrace_kernels.ops import Results


@dataclass(slots=True)
class Prepared:
    """A batch, and whose logits come back: those of `sampled` first, then the rows of `prompt_rows`.

    Of a sampled sequence come the row of its newest token and those of its drafts.
    """

    batch: Batch
    work: StepWork
    sampled: NDArray[np.int64]  # places in `work`
    rows: Rows  # of these, as the sampler takes them
    prompt_rows: list[tuple[Work, NDArray[np.int32]]]  # with the token that each row predicts
    pooled: list[tuple[Work, int]]  # how many of `batch.pool_rows` are of each

    def pooled_rows(self, of_model: Callable[[], Results]) -> list[tuple[Work, Floats]]:
        """The rows that each sequence pools. A chunk may have none: the last one is enough for some."""
        found: list[tuple[Work, Floats]] = []
        if self.batch.pool_rows is None:
            return found
        results, first = of_model(), 0
        rows = results if isinstance(results, np.ndarray) else results.cpu().numpy()
        for item, count in self.pooled:
            if count:
                found.append((item, rows[first : first + count]))
            first += count
        return found


def build(
    input_batch: InputBatch, work: StepWork, newest_of: torch.Tensor | None = None
) -> Prepared:
    """For sequences that have not ended. With `newest_of` their newest tokens are there, by batch row."""
    arrays, rows, prompts, scored = input_batch.core.build(
        work.batch_rows,
        counts=work.counts,
        drafts=work.drafts,
        scores=work.scores,
        on_device=newest_of is not None,
    )
    tokens, positions, slots, seq_starts, context_lens, tables, logit_rows, prompt_lens = arrays
    for place, first, stop, row in prompts:
        tokens[row : row + stop - first] = work.sequence(place).tokens(first, stop)
    prompt_rows: list[tuple[Work, NDArray[np.int32]]] = []
    pooled: list[tuple[Work, int]] = []
    pool_rows: list[int] = []
    for place in scored:
        item = work[place]
        begin, row = int(positions[seq_starts[place]]), int(seq_starts[place])
        if item.sequence.pooled is not None:
            wanted = item.sequence.pooled.wanted(begin, item.count)
            pooled.append((item, len(wanted)))
            pool_rows += [row + position - begin for position in wanted]
            continue
        targets = item.sequence.prompt[begin + 1 : begin + item.count + 1]
        prompt_rows.append((item, targets))
        more = np.arange(row, row + len(targets), dtype=np.int32)
        logit_rows = np.concatenate([logit_rows, more])
    batch = Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        seq_starts=seq_starts,
        context_lens=context_lens,
        block_tables=tables,
        logit_rows=logit_rows,
        prompt_lens=prompt_lens,
        newest=newest_of,
        pool_rows=np.array(pool_rows, dtype=np.int32) if pool_rows else None,
    )
    sampled, batch_rows, counts, totals, drafts = rows
    sequences = work.sequences_at(sampled)
    return Prepared(
        batch,
        work,
        sampled,
        Rows(sequences, batch_rows, totals, counts, drafts),
        prompt_rows,
        pooled,
    )

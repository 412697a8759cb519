"""Steps without a request, so that every kernel is compiled before a worker is ready: else requests wait for that.

A kernel is compiled for the types and sizes of the model and for its own constants, not for the number of rows or the
length of contexts. So a few steps of each kind reach them all. Rows decide one thing: a product whose columns are cut
(`dense/parts.py`) stores sums of parts for few rows and results for many. A step of one row and one of the most rows,
of several prompts where a context ends before, reach both. Its tokens differ, so that all ranks of a group get rows for
their experts; how many is nobody's choice, so that is launched in every form (`headrace_kernels/warming.py`). They
write into blocks that nobody has yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling import noise
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits import Draws, TokenIds
from headrace.engine.step.lockstep import Lockstep, RankLoad
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.torch_if_loaded import inference_mode, out_of_memory
from headrace_kernels.warming import every_form

if TYPE_CHECKING:
    from headrace.models import Model
    from headrace_kernels.ops import Results

log = logging.getLogger(__name__)

LIMIT_S = 600.0  # after which no further step begins; a guess


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The steps for one model, whose cache has `num_blocks`."""

    model: Model
    num_blocks: int
    rows: int  # of the largest step
    sequences: int

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """Each with its name, in order: a draft pass reads what the step before it kept."""
        room = min(self.rows, self.num_blocks * self.model.block_tokens)
        tokens = min(room, self.model.context_tokens)
        whole, rest = divmod(room, tokens)
        prompts = ([tokens] * whole + [rest] * (rest > 0))[: self.sequences]
        answers = min(self.sequences, self.rows)
        one, all_at_once = self._batch([2], [1]), self._batch([2] * answers, [1] * answers)
        mixed = self._batch([max(1, tokens - 1), 2], [max(1, tokens - 1), 1])
        steps: list[tuple[str, Callable[[], object]]] = []
        batches = [
            ("as many prompt rows as there may be", self._batch(prompts, prompts)),
            ("one answer", one),
            ("a prompt beside an answer", mixed),
        ]
        if answers > 1:  # the same step again would be recorded, in every form
            batches.insert(2, ("as many answers as there may be", all_at_once))
        for name, batch in batches:
            steps.append((name, partial(self.model.forward, batch)))
            if self.model.drafts:
                steps.append((f"drafts after {name}", partial(self._draft, batch)))
        steps.append(("sampling", self._sample))
        return steps

    def _batch(self, contexts: list[int], counts: list[int]) -> Batch:
        return made_up_batch(contexts, counts, self.model, self.num_blocks)

    def _draft(self, batch: Batch) -> None:
        """A pass over known rows, and one that goes on from it."""
        known = self._draft_batch(batch, np.arange(batch.rows), chained=False)
        self.model.draft(known)
        ones = [1] * batch.seqs
        after = self._batch(batch.context_lens.tolist(), ones)
        self.model.draft(self._draft_batch(after, known.logit_rows, chained=True))

    def _draft_batch(
        self,
        batch: Batch,
        hidden_from: NDArray[np.integer],
        *,
        chained: bool,
    ) -> DraftBatch:
        return DraftBatch(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots,
            seq_starts=batch.seq_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_rows=batch.logit_rows,
            hidden_from=hidden_from.astype(np.int32),
            first_keys=np.zeros(batch.seqs, dtype=np.int32),
            chained=chained,
        )

    def _sample(self) -> None:
        """What a grammar allows, the most probable token, a draw from all, and one from the highest."""
        vocab, count = self.model.vocab_size, min(2, self.sequences)
        logits = logits_of(self._logits(count))
        every = np.full((1, -(-vocab // 32)), 2**32 - 1, dtype=np.uint32)
        logits.mask(np.zeros(1, dtype=np.int64), every)
        _, best = logits.argmax()
        ones = np.ones(count)
        keys = noise.keys(np.arange(count, dtype=np.uint64), np.arange(count))
        draws = Draws(best, ones, np.zeros(count, np.int64), ones * 0.9, ones * 0, *keys)
        logits.race(draws, TokenIds(np.arange(vocab, dtype=np.int32)))
        logits.highest(np.full(count, min(vocab, 20)))

    def _logits(self, rows: int) -> Results:
        """Where the model leaves them."""
        made_up = np.zeros((rows, self.model.vocab_size), dtype=np.float32)
        made_up[:, 0] = 1
        if self.model.ahead_on is None:
            return made_up
        import torch

        return torch.from_numpy(made_up).to(self.model.ahead_on)


def made_up_batch(contexts: list[int], counts: list[int], model: Model, num_blocks: int) -> Batch:
    """Sequences that end with so many new rows, of other tokens each; those of one row are answers."""
    block_tokens = model.block_tokens
    most = -(-max(contexts) // block_tokens)
    starts = np.concatenate(([0], np.cumsum(counts)))
    owner = np.arange(len(counts)).repeat(counts)
    positions = np.arange(starts[-1]) - starts[owner] + (np.array(contexts) - counts)[owner]
    tables = np.arange(len(counts) * most).reshape(-1, most) % num_blocks
    slots = tables[owner, positions // block_tokens] * block_tokens + positions % block_tokens
    return Batch(
        tokens=np.arange(len(owner), dtype=np.int32) % model.vocab_size,
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int64),
        seq_starts=starts.astype(np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables.astype(np.int32),
        logit_rows=(starts[1:] - 1).astype(np.int32),
        prompt_lens=np.where(np.array(counts) > 1, contexts, 1).astype(np.int32),
    )


def warm_up(
    warming: WarmUp,
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    lockstep: Lockstep | None = None,
) -> int:
    """Run the steps and say how far it is. Returns how many were run: not all where `limit_s` is over before.

    The ranks of a group run the same ones, each as a round. Raises `ValueError` where the device has not the memory for
    one, and what a round raises.
    """
    steps = warming.steps()
    began_s = clock()
    with inference_mode(), every_form():
        for done, (name, step) in enumerate(steps):
            spent_s = clock() - began_s
            if not all_begin(lockstep, spent_s < limit_s):
                log.warning(
                    "warm-up: %d of %d steps done in %.0f s, which is all that it may take: requests will wait while "
                    "kernels of %s are compiled",
                    done,
                    len(steps),
                    spent_s,
                    ", ".join(name for name, _ in steps[done:]),
                )
                return done
            try:
                step()
                if fence := warming.model.fence():
                    fence.synchronize()
            except out_of_memory() as error:
                raise ValueError(
                    f"warm-up: no memory for {name}: {error}; give less --max-batched-tokens or --kv-memory"
                ) from error
            log.info("warm-up: %d of %d, %s, %.1f s", done + 1, len(steps), name, clock() - began_s)
    return len(steps)


def all_begin(lockstep: Lockstep | None, begins: bool) -> bool:
    """Whether every rank begins the next step, which is a round of all of them then."""
    if lockstep is None:
        return begins
    return all(load.rows > 0 for load in lockstep.agree(RankLoad(rows=int(begins))))

"""One plan through the model: batch, forward pass, sampled tokens, drafts for the next plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine.adaptive import Adaptive
from headrace.engine.batch_builder import BatchBuilder, Prepared
from headrace.engine.config import EngineConfig
from headrace.engine.draft import Drafter
from headrace.engine.draft_head import DraftHead
from headrace.engine.export import Exports
from headrace.engine.rejection import Rejection
from headrace.engine.sampler import Rows, Sampled, Sampler, token_logprobs
from headrace.engine.schedule import Plan
from headrace.engine.sequence import Sequence
from headrace.engine.verify import Chosen, choose, kept
from headrace.frames import TokenLogprob

if TYPE_CHECKING:
    from headrace.models import Model


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model said."""

    step: Prepared
    chosen: list[Chosen]
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]]


class Forward:
    """The model with what it needs to know of those who have a seat. `clock` counts seconds."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        exports: Exports,
        *,
        context_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._exports = exports
        self._clock = clock
        self._sampler = Sampler(model.vocab_size, config.max_sequences)
        self._builder = BatchBuilder(
            block_tokens=model.block_tokens,
            max_sequences=config.max_sequences,
            max_blocks=-(-context_tokens // config.block_tokens),
        )
        self.adaptive: Adaptive | None = None
        self._rejection: Rejection | None = None
        self.drafter: Drafter | None = None
        if config.mtp > 0:
            head = DraftHead(model.vocab_size, model.draft_token_ids)
            if not config.mtp_fixed:
                self.adaptive = Adaptive(config.mtp, config.max_sequences)
            if config.mtp_verify == "rejection":
                self._rejection = Rejection(self._sampler, head)
            self.drafter = Drafter(
                model,
                self._sampler,
                self._builder,
                self.adaptive,
                self._rejection,
                head=head,
                most=config.mtp,
                clock=clock,
            )

    def blocks_changed(self, sequence: Sequence) -> None:
        """Blocks of a sequence with a seat were exchanged."""
        self._builder.seat(sequence)

    def compute(self, plan: Plan) -> Computed:
        """Raises whatever the model raises. Either way the device writes to no block any more then: what is computed
        can be read by others, and what is freed can be another's.
        """
        for sequence in plan.admitted:
            self._builder.seat(sequence)
            self._sampler.seat(sequence)
            if self.adaptive is not None and sequence.seat is not None:
                self.adaptive.seat(sequence.seat)
        try:
            with torch.inference_mode():
                if self.drafter is not None:
                    self.drafter.begin(plan.work)
                began_s = self._clock()
                step = self._builder.build(plan.work)
                if exports := self._exports.begin(plan):
                    logits = self._model.forward(step.batch, self._exports.progress_of(exports))
                else:
                    logits = self._model.forward(step.batch)
                prompt_logprobs = _prompt_logprobs(step, logits)
                chosen = self._choose(step, logits[: int(step.sampled_rows.sum())])
        except Exception:
            self._wait_for_device()
            raise
        if len(logits) == 0:  # otherwise the rows that were read came after all KV
            self._wait_for_device()
        if self.adaptive is not None and len(step.sampled) == len(plan.work):
            rows = step.batch.rows
            if rows == step.sampled_rows.sum():  # no prompts
                self.adaptive.forward.note(rows, (self._clock() - began_s) * 1e3)
        return Computed(step, chosen, prompt_logprobs)

    def _choose(self, step: Prepared, logits: torch.Tensor) -> list[Chosen]:
        """Tokens for all sequences that are sampled, as many as their drafts allow."""
        if not step.sampled:
            return []
        drafts = step.batch.tokens[step.batch.logit_rows[: len(logits)]]
        rows = Rows.of(step.sampled, step.sampled_rows, drafts)
        sampled = self._sampler.sample(logits, rows)
        if self._rejection is not None:
            self._rejection.judge(logits, rows, sampled)
        counts = kept(rows, sampled.ids)
        if self.adaptive is not None:
            self.adaptive.checked(rows.seats, rows.counts - 1, np.maximum(counts - 1, 0))
        chosen = choose(rows, sampled.ids, counts)
        return self._with_logprobs(sampled, rows, chosen) if sampled.raw is not None else chosen

    def _with_logprobs(self, sampled: Sampled, rows: Rows, chosen: list[Chosen]) -> list[Chosen]:
        lengths = np.fromiter((len(item.ids) for item in chosen), np.int64, len(chosen))
        starts = rows.starts
        offsets = np.arange(len(sampled.ids)) - np.repeat(starts, rows.counts)
        entries = self._sampler.logprobs(sampled, rows, offsets < np.repeat(lengths, rows.counts))
        found: list[Chosen] = []
        for item, start in zip(chosen, starts.tolist(), strict=True):
            own = [entry for entry in entries[start : start + len(item.ids)] if entry is not None]
            wanted = item.sequence.sampling.logprobs is not None
            found.append(item._replace(logprobs=own) if wanted else item)
        return found

    def draft(self, plan: Plan, computed: Computed, ended: set[Sequence]) -> None:
        """Draft for the next step. The tokens of this one are in the sequences; raises as `compute`."""
        if self.drafter is None:
            return
        try:
            with torch.inference_mode():
                behind = self.drafter.follow(computed.step, plan.work, ended)
        except Exception:
            self._wait_for_device()
            raise
        if behind:
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        if fence := self._model.fence():
            fence.synchronize()


def _prompt_logprobs(
    step: Prepared, logits: torch.Tensor
) -> list[tuple[Sequence, list[TokenLogprob]]]:
    found: list[tuple[Sequence, list[TokenLogprob]]] = []
    row = len(step.sampled)
    for sequence, targets in step.prompt_rows:
        rows = logits[row : row + len(targets)]
        row += len(targets)
        top = sequence.sampling.prompt_logprobs or 0
        entries = token_logprobs(rows, targets.astype(np.int64), [top] * len(targets))
        found.append((sequence, entries))
    return found

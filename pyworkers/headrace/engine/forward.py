"""One plan through the model: batch, forward pass, sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine.batch_builder import BatchBuilder, Prepared
from headrace.engine.export import Exports
from headrace.engine.sampler import Sampler, token_logprobs
from headrace.engine.schedule import Plan
from headrace.engine.sequence import Sequence
from headrace.frames import TokenLogprob

if TYPE_CHECKING:
    from headrace.models import Model


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model said. A token is `None` where the logits were not finite."""

    tokens: list[tuple[Sequence, int | None, TokenLogprob | None]]
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]]


class Forward:
    """The model with what it needs to know of those who have a seat."""

    def __init__(
        self, model: Model, exports: Exports, *, max_sequences: int, max_blocks: int
    ) -> None:
        self._model = model
        self._exports = exports
        self._sampler = Sampler(model.vocab_size, max_sequences)
        self._builder = BatchBuilder(
            block_tokens=model.block_tokens, max_sequences=max_sequences, max_blocks=max_blocks
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
        step = self._builder.build(plan.work)
        try:
            with torch.inference_mode():
                if exports := self._exports.begin(plan):
                    logits = self._model.forward(step.batch, self._exports.progress_of(exports))
                else:
                    logits = self._model.forward(step.batch)
                prompt_logprobs = _prompt_logprobs(step, logits)
                sampled = self._sampler.sample(logits[: len(step.sampled)], step.sampled)
        except Exception:
            self._wait_for_device()
            raise
        if len(logits) == 0:  # otherwise the rows that were read came after all KV
            self._wait_for_device()
        tokens = zip(step.sampled, sampled.ids, sampled.logprobs, strict=True)
        return Computed(list(tokens), prompt_logprobs)

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

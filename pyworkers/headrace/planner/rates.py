"""Tokens a second of one GPU of a group that has enough to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.planner.model.assumptions import MIXED_BALANCE
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.step import StepTime, decode_step, prefill_step

STEP_TOKENS = 16_384  # of prompts, in a step of a rank; as in the published runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a request. Of a prompt, `cached` are in the cache already."""

    prompt: float
    answer: float
    cached: float = 0.0
    spread: float | None = (
        None  # standard deviation of a running row's context; None: of equal requests under way
    )

    @property
    def context(self) -> float:
        """Mean of a running row."""
        return self.prompt + self.answer / 2

    @property
    def context_spread(self) -> float:
        return self.answer / math.sqrt(12) if self.spread is None else self.spread

    @property
    def computed(self) -> float:
        return max(self.prompt - self.cached, 1.0)


def prefill_of(
    group: ExpertGroup,
    lengths: Lengths,
    tokens: float = STEP_TOKENS,
    *,
    overlap: bool | None = None,
) -> StepTime:
    return prefill_step(group, tokens, lengths.computed, cached=lengths.cached, overlap=overlap)


def decode_of(
    group: ExpertGroup, lengths: Lengths, rows: float, *, overlap: bool | None = None
) -> StepTime:
    spread = lengths.context_spread
    return decode_step(group, rows, lengths.context, spread=spread, overlap=overlap)


def rows_that_fit(group: ExpertGroup, lengths: Lengths) -> int:
    return max(int(group.kv_tokens // lengths.context), 0)


def prompt_ms(group: ExpertGroup, lengths: Lengths, tokens: float = STEP_TOKENS) -> float:
    """Time of one GPU for one prompt, in full steps."""
    return prefill_of(group, lengths, tokens).ms * lengths.computed / tokens


def answer_ms(group: ExpertGroup, lengths: Lengths, rows: float, accepted: float) -> float:
    """Time of one GPU for one answer, with `rows` under way."""
    return decode_of(group, lengths, rows).ms * lengths.answer / accepted / rows


def mixed_ms(
    group: ExpertGroup, lengths: Lengths, rows: float, accepted: float, tokens: float
) -> float:
    """Time of one GPU for one request where prompts and answers share it."""
    alone = prompt_ms(group, lengths, tokens) + answer_ms(group, lengths, rows, accepted)
    return alone / MIXED_BALANCE

"""How long a step takes: all ranks of a group wait for the slowest in each layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headrace.planner.model import shape
from headrace.planner.model.assumptions import GLUE_US, ROOF_SHARE, STEP_GAP_US
from headrace.planner.model.exchange import COMBINE_ROW_BYTES, DISPATCH_ROW_BYTES, exchange_us
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.kernels import decode_us, experts_us, prefill_us
from headrace.planner.model.roofline import product_us
from headrace.planner.model.skew import busiest_rows


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Microseconds of one layer with experts, on the slowest rank."""

    attention: float
    experts: float
    shared: float
    glue: float
    dispatch: float
    combine: float

    @property
    def computing(self) -> float:
        return self.attention + self.experts + self.shared + self.glue

    @property
    def exchanging(self) -> float:
        return self.dispatch + self.combine

    @property
    def in_turn(self) -> float:
        """One batch. The shared expert runs while rows are on their way out."""
        own = self.attention + self.experts + self.glue
        return own + max(self.dispatch, self.shared) + self.combine


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of one step."""

    experts_ms: float  # of the layers with experts, whole
    dense_ms: float  # of the other layers
    head_ms: float
    drafts_ms: float
    gap_ms: float
    layer: LayerTime  # with the whole batch
    overlapped: bool  # two half batches: one computes while the other's rows are on their way

    @property
    def ms(self) -> float:
        return self.experts_ms + self.dense_ms + self.head_ms + self.drafts_ms + self.gap_ms


def accepted_tokens(drafts: int, acceptance: float) -> float:
    """Tokens that a row gets from a step, where a draft is right with this chance if those before it are."""
    return sum(acceptance**place for place in range(drafts + 1))


def slowest_context(context: float, spread: float, rows: float, ranks: int) -> float:
    """Mean context on the rank that has most. `spread` is the standard deviation of a row's."""
    return context + spread * math.sqrt(2 * math.log(ranks) / rows)


def decode_step(
    group: ExpertGroup,
    rows: float,
    context: float,
    *,
    spread: float = 0.0,
    overlap: bool | None = None,
) -> StepTime:
    """Of `rows` sequences on each rank. `overlap`: whether two half batches overlap; None: where that is quicker."""
    gpu, context = group.gpu, slowest_context(context, spread, rows, group.ranks)
    tokens = rows * (1 + group.drafts)

    def layer(of_tokens: float) -> LayerTime:
        attention = decode_us(gpu, group.linear, group.kv, of_tokens, context)
        return _layer(group, attention, of_tokens, forwards=False)

    # the first pass drafts behind all rows that were verified, each further one behind one row a sequence
    passes = [tokens, *[rows] * (group.drafts - 1)] if group.drafts else []
    drafts_us = sum(
        layer(of_pass).in_turn
        + product_us(gpu, shape.MTP_INPUT, "fp8", of_pass)
        + product_us(gpu, shape.HEAD, "bf16", rows)
        for of_pass in passes
    )
    return _step(group, layer, tokens, heads=tokens, drafts_us=drafts_us, overlap=overlap)


def prefill_step(
    group: ExpertGroup,
    tokens: float,
    prompt: float,
    *,
    cached: float = 0.0,
    balance: float = 1.0,
    overlap: bool | None = None,
) -> StepTime:
    """Of `tokens` on the busiest rank, from prompts with `prompt` tokens to compute, each behind `cached` others.

    `balance` is the mean of all ranks' tokens over the busiest's.
    """

    def layer(of_tokens: float) -> LayerTime:
        attention = prefill_us(group.gpu, group.linear, group.kv, of_tokens / prompt, prompt)
        behind = shape.PAIR_FLOPS * of_tokens * cached / group.gpu.bf16_flops * 1e6 / ROOF_SHARE
        return _layer(group, attention + behind, of_tokens, forwards=True, balance=balance)

    drafts_us = layer(tokens).in_turn if group.drafts else 0.0  # KV of the layer that drafts
    heads = max(1.0, tokens / prompt)
    return _step(group, layer, tokens, heads=heads, drafts_us=drafts_us, overlap=overlap)


def _layer(
    group: ExpertGroup, attention: float, tokens: float, *, forwards: bool, balance: float = 1.0
) -> LayerTime:
    gpu, ranks = group.gpu, group.ranks
    rows = busiest_rows(balance * tokens * shape.TOP_K, ranks, group.imbalance)

    def one_way(row_bytes: int, step: str) -> float:
        return exchange_us(gpu, ranks, tokens, row_bytes, step=step, forwards=forwards)

    return LayerTime(
        attention=attention,
        experts=experts_us(gpu, group.weights, group.slots, rows),
        shared=product_us(gpu, shape.EXPERT, "fp8", tokens),
        glue=GLUE_US,
        dispatch=one_way(DISPATCH_ROW_BYTES[group.weights], "dispatch"),
        combine=one_way(COMBINE_ROW_BYTES, "combine"),
    )


def _step(
    group: ExpertGroup,
    layer: Callable[[float], LayerTime],
    tokens: float,
    *,
    heads: float,
    drafts_us: float,
    overlap: bool | None,
) -> StepTime:
    whole, half = layer(tokens), layer(tokens / 2)
    overlapping = 2 * max(half.computing, half.exchanging)
    overlapped = overlapping < whole.in_turn if overlap is None else overlap
    dense_us = whole.attention + whole.glue + product_us(group.gpu, shape.DENSE_MLP, "fp8", tokens)
    return StepTime(
        experts_ms=shape.MOE_LAYERS * (overlapping if overlapped else whole.in_turn) / 1e3,
        dense_ms=shape.DENSE_LAYERS * dense_us / 1e3,
        head_ms=product_us(group.gpu, shape.HEAD, "bf16", heads) / 1e3,
        drafts_ms=drafts_us / 1e3,
        gap_ms=STEP_GAP_US / 1e3,
        layer=whole,
        overlapped=overlapped,
    )

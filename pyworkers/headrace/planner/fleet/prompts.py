"""The fewest GPUs for the prompts of some traffic."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planner.errors import DoesNotFit, OutOfReach
from headrace.planner.fleet.choices import MOST_GPUS, Choices, fewest, fitting, too_many
from headrace.planner.fleet.options import STEP_TOKENS, PrefillOption
from headrace.planner.fleet.prefill_pool import first_tokens_s
from headrace.planner.fleet.traffic import SloLimits, Traffic
from headrace.planner.quantile import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPool:
    option: PrefillOption
    groups: int
    ttft_s: float  # at the percentile of the limits
    first_s: tuple[float, ...]  # when each request has its first token

    @property
    def gpus(self) -> int:
        return self.groups * self.option.group.ranks


def fewest_for_prompts(
    traffic: Traffic, limits: SloLimits, choices: Choices, pace: float
) -> PrefillPool:
    longest = max(one.prompt for one in traffic.requests)
    kinds = fitting(choices.base, choices.prefill_sizes, longest)
    options = [
        PrefillOption(group=group, step_tokens=tokens) for group in kinds for tokens in STEP_TOKENS
    ]
    prompts = [
        (one.at_s, one.prompt - (cached := traffic.cached(one)), cached) for one in traffic.requests
    ]
    alone = {
        id(option): pace
        * quantile([option.alone_s(new, old) for _, new, old in prompts], limits.share)
        for option in options
    }
    best_s = min(alone.values())
    if best_s > limits.ttft_s:
        some = (
            f"{100 - limits.percentile:.3g} % of the prompts take"
            if limits.share < 1
            else "one takes"
        )
        why = f"one GPU computes the attention of a prompt, and {some} longer even alone"
        raise OutOfReach("ttft", limits.ttft_s, best_s, why)
    best: PrefillPool | None = None
    bounds = [(_prompt_gpus(option, prompts, traffic.span_s, pace), option) for option in options]
    for bound, option in sorted(bounds, key=lambda pair: pair[0]):
        if alone[id(option)] > limits.ttft_s:
            continue
        ranks = option.group.ranks
        most = MOST_GPUS if best is None else best.gpus - 1
        if ranks * math.ceil(bound / ranks) > most:
            continue

        reached = functools.partial(_ttft, traffic, limits, prompts, option, pace)
        found = fewest(reached, limits.ttft_s, math.ceil(bound / ranks), most // ranks)
        if found is not None:
            groups, ttft_s, first = found
            best = PrefillPool(option=option, groups=groups, ttft_s=ttft_s, first_s=tuple(first))
    if best is None:
        raise DoesNotFit(too_many("prompts", min(bound for bound, _ in bounds)))
    return best


def _ttft(
    traffic: Traffic,
    limits: SloLimits,
    prompts: Sequence[tuple[float, int, int]],
    option: PrefillOption,
    pace: float,
    groups: int,
) -> tuple[float, list[float]]:
    """What so many groups reach, and when each request has its first token."""

    def step_ms(tokens: int, prompt: int, behind: int, balance: float) -> float:
        return pace * option.step_ms(tokens, prompt, behind, balance)

    first = first_tokens_s(
        prompts,
        groups=groups,
        ranks=option.group.ranks,
        step_tokens=option.step_tokens,
        step_ms=step_ms,
    )
    waits = (at - one.at_s for at, one in zip(first, traffic.requests, strict=True))
    return quantile(waits, limits.share), first


def _prompt_gpus(
    option: PrefillOption, prompts: Sequence[tuple[float, int, int]], span_s: float, pace: float
) -> float:
    """Fewer GPUs would fall ever further behind: the work at the best rate, over the time there is for it."""
    tokens = option.step_tokens
    of_token_ms = min(option.step_ms(tokens, length, 0) for length in (256, 1024, 4096)) / tokens
    return pace * of_token_ms / 1e3 * sum(new for _, new, _ in prompts) / (2 * span_s)

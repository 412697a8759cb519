"""The fewest GPUs for the answers of some traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.planner.errors import DoesNotFit, OutOfReach
from headrace.planner.fleet.choices import MOST_GPUS, Choices, fewest, fitting, too_many
from headrace.planner.fleet.decode_pool import last_tokens_s
from headrace.planner.fleet.options import DecodeOption
from headrace.planner.fleet.prompts import PrefillPool
from headrace.planner.fleet.traffic import SloLimits, Traffic
from headrace.planner.model import shape
from headrace.planner.model.assumptions import LINK_SHARE
from headrace.planner.model.step import accepted_tokens
from headrace.planner.quantile import quantile

# Of the rough time of a lone row over the limit, from which an option is not looked at: sizes are rounded by less.
HOPELESS = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    option: DecodeOption
    groups: int
    tpot_s: float

    @property
    def gpus(self) -> int:
        return self.groups * self.option.group.ranks


@dataclass(frozen=True, slots=True)
class _Answer:
    """The tokens after the first, which prefill gives."""

    first_s: float
    ready_s: float  # when its KV has crossed the network from one card to another
    prompt: int
    tokens: int


def pools_for_answers(
    traffic: Traffic, limits: SloLimits, choices: Choices, prefill: PrefillPool, pace: float
) -> list[DecodePool]:
    """The best of each size, the one with the fewest GPUs first; of equals the smallest groups."""
    answers = _answers(traffic, choices, prefill)
    options = [
        DecodeOption(group=group, accepted=accepted_tokens(drafts, choices.acceptance))
        for drafts in choices.drafts
        for group in fitting(
            replace(choices.base, drafts=drafts), choices.decode_sizes, traffic.longest
        )
    ]
    searches = [_DecodeSearch(option, answers, limits, pace) for option in options]
    promising = [one for one in searches if one.roughly_s() <= HOPELESS * limits.tpot_s]
    pools: list[DecodePool] = []
    for ranks in sorted({one.ranks for one in promising}):
        best: DecodePool | None = None
        for one in promising:
            if one.ranks == ranks:
                best = one.fewer_than(best) or best
        if best is not None:
            pools.append(best)
    if not pools:
        best_s = min(one.at_best_s() for one in promising or searches)
        if best_s <= limits.tpot_s:
            raise DoesNotFit(too_many("answers", MOST_GPUS))
        raise OutOfReach("tpot", limits.tpot_s, best_s, "rows take longer even alone on their GPUs")
    return sorted(pools, key=lambda pool: (pool.gpus, pool.option.group.ranks))


def _answers(traffic: Traffic, choices: Choices, prefill: PrefillPool) -> list[_Answer]:
    """Those with more than one token; the first request's where there are none, so that a group stands by."""
    kv_bytes = shape.kv_token_bytes(choices.base.kv, drafts=max(choices.drafts) > 0)
    token_s = kv_bytes / (LINK_SHARE * choices.base.gpu.network_bytes_per_s)
    answers = [
        _Answer(first, first + token_s * one.prompt, one.prompt, one.answer - 1)
        for first, one in zip(prefill.first_s, traffic.requests, strict=True)
        if one.answer > 1
    ]
    first = prefill.first_s[0]
    return answers or [_Answer(first, first, traffic.requests[0].prompt, 1)]


@dataclass(frozen=True, slots=True)
class _DecodeSearch:
    """How many groups of one kind."""

    option: DecodeOption
    answers: Sequence[_Answer]
    limits: SloLimits
    pace: float

    @property
    def ranks(self) -> int:
        return self.option.group.ranks

    def roughly_s(self) -> float:
        """Time for a token where every row is alone on its GPU, by mean contexts."""
        contexts = (one.prompt + one.tokens / 2 for one in self.answers)
        times = (self.option.row_ms(1, context) for context in contexts)
        return self.pace * quantile(times, self.limits.share) / 1e3

    def at_best_s(self) -> float:
        """The same with as many groups as make a difference: a GPU for each answer."""
        return self.reached(-(-len(self.answers) // self.ranks))[0]

    def fewer_than(self, best: DecodePool | None) -> DecodePool | None:
        """The smallest pool within the limit that has fewer GPUs than `best`."""
        enough = -(-len(self.answers) // self.ranks)
        allowed = (MOST_GPUS if best is None else best.gpus - 1) // self.ranks
        found = fewest(self.reached, self.limits.tpot_s, 1, min(allowed, enough))
        if found is None:
            return None
        groups, tpot_s, _ = found
        return DecodePool(option=self.option, groups=groups, tpot_s=tpot_s)

    def reached(self, groups: int) -> tuple[float, list[float]]:
        """Time per token at the percentile, with what moving KV and waiting for room add; and when answers end."""
        ended = last_tokens_s(
            [(one.ready_s, one.prompt, one.tokens) for one in self.answers],
            ranks=groups * self.ranks,
            kv_tokens=groups * self.ranks * self.option.group.kv_tokens,
            row_ms=self._row_ms,
        )
        spans = (end - one.first_s for end, one in zip(ended, self.answers, strict=True))
        times = (span / one.tokens for span, one in zip(spans, self.answers, strict=True))
        return quantile(times, self.limits.share), ended

    def _row_ms(self, rows: int, context: float) -> float:
        return self.pace * self.option.row_ms(rows, context)

"""Prompts on their way through groups that only compute prompts."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

StepMs = Callable[[int, int, int, float], float]
"""Milliseconds of a step: tokens of the busiest rank; of its prompts, tokens and those before; mean over busiest."""


@dataclass(slots=True)
class _Prompt:
    number: int
    tokens: int  # to compute
    behind: int  # computed or cached before


@dataclass(slots=True)
class _Rank:
    waiting: deque[_Prompt] = field(default_factory=deque["_Prompt"])
    tokens: int = 0  # of those that wait


@dataclass(slots=True)
class _PrefillGroup:
    ranks: list[_Rank]
    tokens: int = 0  # that wait or are in the step
    in_step: int = 0
    done: list[int] = field(default_factory=list[int])  # with the step that runs


def first_tokens_s(
    prompts: Sequence[tuple[float, int, int]],
    *,
    groups: int,
    ranks: int,
    step_tokens: int,
    step_ms: StepMs,
) -> list[float]:
    """When each prompt is computed. A prompt is when it comes in seconds, its tokens to compute, and those before them.

    It goes to the group with the fewest tokens, there to the rank with the fewest that wait. A rank takes up to
    `step_tokens` a step, in order; the ranks of a group step together.
    """
    pool = [_PrefillGroup([_Rank() for _ in range(ranks)]) for _ in range(groups)]
    computed = [0.0] * len(prompts)
    ends: list[tuple[float, int]] = []  # of the steps that run

    def begin(number: int, now: float) -> None:
        group = pool[number]
        group.done.clear()
        busiest, total = (0, 0, 0), 0
        for rank in group.ranks:
            taken, length, behind, of_step = 0, 0, 0, 0
            while rank.waiting and taken < step_tokens:
                prompt = rank.waiting[0]
                part = min(prompt.tokens, step_tokens - taken)
                taken += part
                of_step += 1
                length += part
                behind += prompt.behind
                prompt.tokens -= part
                prompt.behind += part
                if not prompt.tokens:
                    group.done.append(rank.waiting.popleft().number)
            rank.tokens -= taken
            total += taken
            if taken:
                busiest = max(busiest, (taken, length // of_step, behind // of_step))
        group.in_step = total
        if total:
            balance = total / len(group.ranks) / busiest[0]
            heapq.heappush(ends, (now + step_ms(*busiest, balance) / 1e3, number))

    def end_steps(until: float) -> None:
        while ends and ends[0][0] <= until:
            at, number = heapq.heappop(ends)
            group = pool[number]
            for prompt in group.done:
                computed[prompt] = at
            group.tokens -= group.in_step
            begin(number, at)

    for number, (at, tokens, behind) in enumerate(prompts):
        end_steps(at)
        chosen = min(range(groups), key=lambda n: pool[n].tokens)
        group = pool[chosen]
        rank = min(group.ranks, key=lambda one: one.tokens)
        rank.waiting.append(_Prompt(number, tokens, behind))
        rank.tokens += tokens
        group.tokens += tokens
        if not group.in_step:
            begin(chosen, at)
    end_steps(float("inf"))
    return computed

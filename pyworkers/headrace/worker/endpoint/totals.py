"""What a worker counts for `/metrics`, all of it since its start. Reached once a step and once a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from headrace.engine.result import StepResult

# Upper bounds of the buckets in seconds, as the router's histograms have them; one more bucket has none.
BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)


@dataclass(slots=True)
class Durations:
    """How many were at most as long as each bound and longer than the one before, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class EngineTotals:
    """What the engine did, for all routers together."""

    steps: Durations = field(default_factory=Durations)
    prompt_tokens: int = 0  # computed, those of preempted requests again
    cached_tokens: int = 0  # of prompts, not computed
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])  # requests, by the word for how
    _last_step: int = 0

    def stepped(self, result: StepResult) -> None:
        """What was said after a step, or between steps of requests that ended then."""
        self.output_tokens += result.output_tokens
        for ended in result.ended:
            self.cached_tokens += ended.cached_tokens or 0
        if result.step > self._last_step:
            self._last_step = result.step
            self.steps.observe(result.ms / 1e3)
            self.prompt_tokens += result.prefill_tokens
            self.drafted_tokens += result.drafted
            self.accepted_tokens += result.accepted

    def copy(self) -> EngineTotals:
        """As they are now, for another thread."""
        return deepcopy(self)


@dataclass(slots=True)
class SpanTotals:
    """Spans that the collector took, and those that were lost by why."""

    exported: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])

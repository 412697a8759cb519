"""What a fleet has to serve: requests with their times, and how fast they must be served."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planner.trace import TracedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SloLimits:
    """Service-level objective: so many per cent of the requests keep both limits."""

    ttft_s: float
    tpot_s: float
    percentile: float = 99.0

    @property
    def share(self) -> float:
        return self.percentile / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests at the speed at which they come, and the share of each prompt that caches hold."""

    requests: tuple[TracedRequest, ...]
    hit_rate: float = 0.0

    @classmethod
    def at_speed(cls, requests: list[TracedRequest], speed: float, hit_rate: float) -> Traffic:
        faster = (TracedRequest(one.at_s / speed, one.prompt, one.answer) for one in requests)
        return cls(requests=tuple(faster), hit_rate=hit_rate)

    @property
    def span_s(self) -> float:
        """From the first to the last arrival; of requests that come at once, a second."""
        return self.requests[-1].at_s or 1.0

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt for one in self.requests)

    @property
    def answer_tokens(self) -> int:
        return sum(one.answer for one in self.requests)

    @property
    def longest(self) -> int:
        return max(one.prompt + one.answer for one in self.requests)

    def cached(self, request: TracedRequest) -> int:
        """At least the last token of a prompt is computed."""
        return min(int(self.hit_rate * request.prompt), request.prompt - 1)

"""What a worker's log tells of requests: a line for each that ended, so many a second at most, and one line every ten
seconds while there is work. The names are those of the router's lines (`router/src/log/requests.rs`).

Nothing here is reached by each token: requests are noted when they come, begin and end, and a step's tokens are one
sum. A request is a leg here: `request` is the `X-Request-ID` that its router's line has, too, and `leg` the number that
it has on the link to that router.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Load, Submit, Transferred
from headrace.worker.endpoint.totals import EngineTotals
from headrace.worker.log.leg import Leg, LegEnd
from headrace.worker.log.log_format import fields

if TYPE_CHECKING:
    from headrace.worker.log.traces.legs import LegSpans

log = logging.getLogger(__name__)

SUMMARY_S = 10.0


@dataclass(slots=True)
class _Since:
    """What was counted since the last summary."""

    finished: int = 0
    failed: int = 0
    left_out: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def nothing(self) -> bool:
        return self == _Since()


class LineRate:
    """Lets so many lines a second through."""

    def __init__(self, a_second: int) -> None:
        self._a_second = a_second
        self._second = -1
        self._count = 0

    def admits(self, now_s: float) -> bool:
        if int(now_s) > self._second:
            self._second, self._count = int(now_s), 0
        self._count += self._count < self._a_second + 1
        return self._count <= self._a_second


@dataclass(slots=True, kw_only=True)
class WorkerLog:
    """Legs from their arrival to their end. Holds no more of them than the engine does."""

    worker: str
    model: str
    blocks: int
    lines_per_s: int
    spans: LegSpans | None = None
    totals: EngineTotals = field(default_factory=EngineTotals)
    _legs: dict[Key, Leg] = field(default_factory=dict[Key, Leg])
    _since: _Since = field(default_factory=_Since)
    _summed_s: float | None = None
    _finished: LineRate = field(init=False)
    _failed: LineRate = field(init=False)  # apart: a flood of refusals hides no answer

    def __post_init__(self) -> None:
        self._finished = LineRate(self.lines_per_s)
        self._failed = LineRate(self.lines_per_s)

    def admitted(self, key: Key, submit: Submit, router: str, now_s: float) -> None:
        """The engine has it."""
        self._legs[key] = _leg(key.request, submit, router, now_s)

    def refused(self, submit: Submit, router: str, error: str, why: str, now_s: float) -> None:
        """The engine did not take it."""
        prompt_tokens = len(submit.tokens) // 4
        end = LegEnd(at_s=now_s, error=error, why=why, prompt_tokens=prompt_tokens)
        self._tell(_leg(submit.request, submit, router, now_s), end)

    def stepped(self, result: StepResult, now_s: float) -> None:
        """What a step gave."""
        self.totals.stepped(result)
        self._since.output_tokens += result.output_tokens
        began_s = now_s - result.ms / 1e3
        for key in result.admitted:
            if (leg := self._legs.get(key)) is not None and leg.admitted_s is None:
                leg.admitted_s = max(began_s, leg.came_s)
        for key in result.begun:
            if (leg := self._legs.get(key)) is not None:
                leg.first_token_s = now_s
        for ended in result.ended:
            self._ended(ended, now_s)

    def transferred(self, key: Key, report: Transferred, now_s: float) -> None:
        """The KV for it came from elsewhere, or does not."""
        if (leg := self._legs.get(key)) is not None:
            leg.transfer = (now_s, report)

    def cancelled(self, key: Key, now_s: float) -> None:
        """Its router wants no more of it: its client left, a stop string came, or it goes on elsewhere."""
        if (leg := self._legs.pop(key, None)) is not None:
            self._tell(leg, LegEnd(at_s=now_s, finish="cancelled"))

    def left(self, link: int, now_s: float) -> None:
        """Its router is gone, and all of its requests with it."""
        for key in [key for key in self._legs if key.link == link]:
            leg, end = self._legs.pop(key), LegEnd(at_s=now_s, error="router_left")
            self.totals.ended["router_left"] += 1
            self._trace(leg, end)

    def sum_up(self, load: Load, now_s: float) -> None:
        """Tell of the time since the last call, unless nothing happened and nothing runs."""
        since, began_s = self._since, self._summed_s
        self._since, self._summed_s = _Since(), now_s
        if began_s is None or (since.nothing and not load.running and not load.waiting):
            return
        seconds = max(now_s - began_s, 1e-9)
        cached, prompt = since.cached_tokens, since.prompt_tokens
        said = fields(
            requests=since.finished,
            failed=since.failed,
            running=load.running,
            waiting=load.waiting,
            output_tokens_per_s=round(since.output_tokens / seconds, 1),
            prompt_tokens_per_s=round(prompt / seconds, 1),
            kv_used=load.blocks_used / self.blocks if self.blocks else None,
            hit_rate=min(cached / prompt, 1.0) if prompt else None,
            worker=self.worker,
            lines_left_out=since.left_out or None,
        )
        log.info("the last 10 s", extra=said)

    def _ended(self, ended: EndedSequence, now_s: float) -> None:
        leg = self._legs.pop(ended.key, None)
        if leg is None:
            return
        self._since.prompt_tokens += ended.prompt_tokens
        self._since.cached_tokens += ended.cached_tokens or 0
        end = LegEnd(
            at_s=now_s,
            finish=ended.finish,
            error=ended.error,
            why=ended.why,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            output_tokens=ended.output_tokens,
        )
        self._tell(leg, end)

    def _tell(self, leg: Leg, end: LegEnd) -> None:
        self.totals.ended[end.error or end.finish or ""] += 1
        self._trace(leg, end)
        if end.error is None:
            self._since.finished += 1
        else:
            self._since.failed += 1
        if not (self._finished if end.error is None else self._failed).admits(end.at_s):
            self._since.left_out += 1
            return
        first_s, more = leg.first_token_s, (end.output_tokens or 0) - 1
        said = fields(
            request=leg.request_id or None,
            model=self.model,
            finish=end.finish,
            error=end.error,
            why=end.why,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            output_tokens=end.output_tokens,
            ttft_ms=None if first_s is None else _ms(first_s - leg.came_s),
            tpot_ms=None if first_s is None or more < 1 else _ms((end.at_s - first_s) / more),
            total_ms=_ms(end.at_s - leg.came_s),
            worker=self.worker,
            leg=leg.number,
            router=leg.router,
        )
        log.info("request finished" if end.error is None else "request failed", extra=said)

    def _trace(self, leg: Leg, end: LegEnd) -> None:
        if self.spans is not None:
            self.spans.ended(leg, end)


def _leg(number: int, submit: Submit, router: str, now_s: float) -> Leg:
    return Leg(
        number=number,
        request_id=submit.request_id,
        router=router,
        came_s=now_s,
        trace=submit.trace,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)

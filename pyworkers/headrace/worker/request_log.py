"""What a worker's log tells of requests: a line for each that ended, so many a second at most, and one line every ten
seconds while there is work. The names are those of the router's lines (`router/src/log/requests.rs`).

Nothing here is reached by each token: requests are noted when they come, begin and end, and a step's tokens are one
sum. A request is a leg here: `leg` is the number that its router knows it by, whose line has it beside the client's id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Load, Submit
from headrace.worker.endpoint.totals import EngineTotals
from headrace.worker.log_format import fields

log = logging.getLogger(__name__)

SUMMARY_S = 10.0


@dataclass(slots=True)
class _Leg:
    """A request that runs or waits. Times are those of the event loop's clock."""

    router: str
    came_s: float
    began_s: float | None = None  # its first token


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
    totals: EngineTotals = field(default_factory=EngineTotals)
    _legs: dict[Key, _Leg] = field(default_factory=dict[Key, _Leg])
    _since: _Since = field(default_factory=_Since)
    _summed_s: float | None = None
    _finished: LineRate = field(init=False)
    _failed: LineRate = field(init=False)  # apart: a flood of refusals hides no answer

    def __post_init__(self) -> None:
        self._finished = LineRate(self.lines_per_s)
        self._failed = LineRate(self.lines_per_s)

    def admitted(self, key: Key, router: str, now_s: float) -> None:
        """The engine has it."""
        self._legs[key] = _Leg(router, now_s)

    def refused(self, submit: Submit, router: str, error: str, why: str, now_s: float) -> None:
        """The engine did not take it."""
        prompt_tokens = len(submit.tokens) // 4
        self._tell(submit.request, router, now_s, error=error, why=why, prompt_tokens=prompt_tokens)

    def stepped(self, result: StepResult, now_s: float) -> None:
        """What a step gave."""
        self.totals.stepped(result)
        self._since.output_tokens += result.output_tokens
        for key in result.begun:
            if (leg := self._legs.get(key)) is not None:
                leg.began_s = now_s
        for ended in result.ended:
            self._ended(ended, now_s)

    def cancelled(self, key: Key, now_s: float) -> None:
        """Its router wants no more of it: its client left, a stop string came, or it goes on elsewhere."""
        if (leg := self._legs.pop(key, None)) is not None:
            self._tell(key.request, leg.router, now_s, finish="cancelled", came_s=leg.came_s)

    def left(self, link: int) -> None:
        """Its router is gone, and all of its requests with it."""
        for key in [key for key in self._legs if key.link == link]:
            del self._legs[key]
            self.totals.ended["router_left"] += 1

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
        first_s = leg.began_s
        more = ended.output_tokens - 1
        self._tell(
            ended.key.request,
            leg.router,
            now_s,
            finish=ended.finish,
            error=ended.error,
            why=ended.why,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            output_tokens=ended.output_tokens,
            ttft_ms=None if first_s is None else (first_s - leg.came_s) * 1e3,
            tpot_ms=None if first_s is None or more < 1 else (now_s - first_s) * 1e3 / more,
            came_s=leg.came_s,
        )

    def _tell(
        self,
        leg: int,
        router: str,
        now_s: float,
        *,
        finish: str | None = None,
        error: str | None = None,
        why: str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        came_s: float | None = None,
    ) -> None:
        self.totals.ended[error or finish or ""] += 1
        if error is None:
            self._since.finished += 1
        else:
            self._since.failed += 1
        if not (self._finished if error is None else self._failed).admits(now_s):
            self._since.left_out += 1
            return

        def tenths(ms: float | None) -> float | None:
            return None if ms is None else round(ms, 1)

        said = fields(
            model=self.model,
            finish=finish,
            error=error,
            why=why,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ttft_ms=tenths(ttft_ms),
            tpot_ms=tenths(tpot_ms),
            total_ms=None if came_s is None else tenths((now_s - came_s) * 1e3),
            worker=self.worker,
            leg=leg,
            router=router,
        )
        log.info("request finished" if error is None else "request failed", extra=said)

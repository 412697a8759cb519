"""An engine whose steps are begun, run and finished in any order that is possible, one of these at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.step.step import EngineStep

Choose = Callable[[int], int]
"""One of so many possibilities."""


class Pipeline:
    """Without `choose` each turn is a whole step."""

    def __init__(self, engine: Engine, choose: Choose | None) -> None:
        self.engine = engine
        self.choose = choose
        self.most_in_flight = 0
        self._to_run: deque[EngineStep] = deque()
        self._ran: deque[EngineStep] = deque()

    @property
    def idle(self) -> bool:
        return self.engine.idle and not len(self.engine.steps)

    def turn(self, now_s: float = 0.0) -> list[StepResult]:
        if self.choose is None and not len(self.engine.steps):
            return [self.engine.step(now_s)]
        results = [self.engine.expire(now_s)]
        possible: list[Callable[[], StepResult | None]] = []
        if self._ran:
            possible.append(lambda: self._finish(now_s))
        if self._to_run:
            possible.append(self._run)
        if self.engine.steps.may_begin and not self.engine.idle and self.choose is not None:
            possible.append(self._begin)
        if possible:
            act = possible[self.choose(len(possible)) if self.choose else 0]
            if result := act():
                results.append(result)
        return results

    def _finish(self, now_s: float) -> StepResult:
        step = self._ran.popleft()
        step.read()
        return self.engine.steps.finish(step, now_s)

    def _begin(self) -> None:
        if step := self.engine.steps.begin():
            self._to_run.append(step)
            self.most_in_flight = max(self.most_in_flight, len(self.engine.steps))

    def _run(self) -> None:
        step = self._to_run.popleft()
        step.run()
        self._ran.append(step)

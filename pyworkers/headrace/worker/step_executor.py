"""The threads that run an engine's steps, one after the other, and which of them are in flight.

While one runs, the next one is prepared and queued behind it: the thread goes from one to the other without waiting for
the event loop, which takes in what the first one gave while the second one runs. Where a device still computes when a
step has run, a second thread waits for that, so that the next step is on the device before it is done with the first.

In a group the thread joins the rounds of other ranks while nothing is planned here. What is planned meanwhile runs in
the next round.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self

from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.step.step import EngineStep
from headrace.worker.step_timer import StepTimer


@dataclass(slots=True, eq=False)
class Running:
    """A step that was given to the thread."""

    step: EngineStep
    done: asyncio.Future[None]
    prepare_s: list[float]  # what it took to plan it, and to launch it where it is read late
    began_s: float  # when the thread came to it, as far as is known here


class StepExecutor:
    """For the event loop, which alone touches the engine. Times are those of `time.perf_counter`.

    `wake` is called when a step has run. With `overlap` a step is prepared while one runs.
    """

    def __init__(
        self,
        engine: Engine,
        wake: Callable[[], None],
        *,
        overlap: bool = True,
    ) -> None:
        self._engine = engine
        self._runner = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine reader")
        self._wake = wake
        self._overlap = overlap
        self._step_timer = StepTimer()
        self._running: deque[Running] = deque()
        self._prepare_s = math.inf
        self._rounds = engine.rounds
        self._joined: Future[None] | None = None  # rounds of others that are joined
        if self._rounds is not None:
            loop = asyncio.get_running_loop()
            self._rounds.on_news(partial(_call_on, loop, wake))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for what runs."""
        if self._rounds is not None:
            self._rounds.wanted = True  # rounds of others end without this rank
            self._rounds.on_news(None)
        self._runner.shutdown()
        self._reader.shutdown()

    @property
    def busy(self) -> bool:
        """A step is in flight."""
        return len(self._running) > 0

    @property
    def done(self) -> bool:
        """The first step in flight has run."""
        return self.busy and self._running[0].done.done()

    @property
    def joins(self) -> bool:
        """Rounds of other ranks run here."""
        return self._joined is not None and not self._joined.done()

    @property
    def prepare_s(self) -> float:
        """When the next step is to be planned; infinite where the end of one in flight comes first."""
        return self._prepare_s if self.busy else -math.inf

    def begin(self) -> bool:
        """Plan a step and give it to the thread. False where there is nothing to compute as yet."""
        self._prepare_s = math.inf
        planning_s = time.perf_counter()
        step = None if self._engine.idle else self._engine.steps.begin()
        if step is None:
            if not self.busy:
                self._join()
            return False
        began_s = time.perf_counter()
        queued_s = None
        if self._rounds is not None and self.joins:
            self._rounds.wanted = True
            queued_s = began_s
        prepare_s = [began_s - planning_s]
        if self._engine.steps.reads_late:
            launched = self._runner.submit(_launch, step, prepare_s, queued_s)
            ran = self._reader.submit(_read, step, launched)
        else:
            ran = self._runner.submit(_run, step, queued_s)
        done = asyncio.wrap_future(ran)
        done.add_done_callback(lambda _: self._wake())
        self._running.append(Running(step, done, prepare_s, began_s))
        if len(self._running) == 1:
            self._prepare_next()
        return True

    def _join(self) -> None:
        """Take part in what other ranks compute, until something is planned here."""
        if self._rounds is None or self.joins or not self._rounds.due:
            return
        self._rounds.wanted = False
        self._engine.steps.tell_waiting()
        self._joined = self._runner.submit(self._rounds.join)
        joined = asyncio.wrap_future(self._joined)
        joined.add_done_callback(lambda _: self._wake())

    def _prepare_next(self) -> None:
        """When to plan the step after the one that runs now."""
        self._prepare_s = math.inf
        if self._overlap and self._engine.steps.may_begin:
            first = self._running[0]
            self._prepare_s = first.began_s + self._step_timer.prepare_after_s(first.step.result)

    def finish(self) -> StepResult:
        """Take in what the first step in flight gave, which has run."""
        first = self._running.popleft()
        first.done.result()
        first.step.read()
        ended_s = time.perf_counter()
        result = self._engine.steps.finish(first.step, asyncio.get_running_loop().time())
        self._step_timer.prepared(sum(first.prepare_s))
        self._step_timer.ended(result, ended_s - first.began_s)
        if self._running:
            self._running[0].began_s = ended_s
            self._prepare_next()
        return result


def _run(step: EngineStep, queued_s: float | None) -> None:
    """A step that was queued behind a round of others waited for that."""
    if queued_s is not None:
        step.result.waited_us += round((time.perf_counter() - queued_s) * 1e6)
    step.run()


def _launch(step: EngineStep, prepare_s: list[float], queued_s: float | None) -> None:
    began_s = time.perf_counter()
    _run(step, queued_s)
    prepare_s.append(time.perf_counter() - began_s)


def _read(step: EngineStep, launched: Future[None]) -> None:
    launched.result()
    step.read()


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread, also once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)

"""The seam between the endpoint's thread and the worker's: what the worker says of itself, asked on its own loop.

An answer shows that the loop turns. At most one question waits for it, however many ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.wire.frames import Load
from headrace.worker.endpoint.totals import EngineTotals, SpanTotals

ANSWER_S = 5.0  # a loop that takes longer stands still. A guess: garbage is collected in a tenth of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker at one moment."""

    worker: str
    model: str
    role: str
    joined: int  # routers
    draining: bool
    blocks: int
    load: Load
    totals: EngineTotals
    spans: SpanTotals | None = None  # where legs are traced


class StandsStill(Exception):
    """The worker's loop did not answer in time."""

    def __str__(self) -> str:
        return f"the worker's event loop has not answered for {ANSWER_S:g} s: see /debug/stack"


class WatchedWorker:
    """A worker from the loading of its model on. `serving` is for its own thread, the rest for the endpoint's."""

    def __init__(self) -> None:
        self._serving: tuple[asyncio.AbstractEventLoop, Callable[[], WorkerReport]] | None = None
        self._asked: asyncio.Future[WorkerReport] | None = None

    @contextmanager
    def serving(self, report: Callable[[], WorkerReport]) -> Generator[None]:
        """From the loop that is to answer."""
        self._serving = asyncio.get_running_loop(), report
        try:
            yield
        finally:
            self._serving = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """None where no worker serves: its model is being loaded, or it has ended."""
        serving = self._serving
        return None if serving is None else serving[0]

    async def report(self) -> WorkerReport | None:
        """None where no worker serves. Raises `StandsStill`."""
        if (serving := self._serving) is None:
            return None
        if self._asked is None or self._asked.done():
            try:
                self._asked = asyncio.wrap_future(_asked(*serving))
            except RuntimeError:  # the loop was closed meanwhile
                return None
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_S)
        except TimeoutError:
            raise StandsStill from None


def _asked(
    loop: asyncio.AbstractEventLoop, report: Callable[[], WorkerReport]
) -> Future[WorkerReport]:
    answer: Future[WorkerReport] = Future()

    def say() -> None:
        try:
            answer.set_result(report())
        except Exception as error:
            answer.set_exception(error)

    loop.call_soon_threadsafe(say)
    return answer

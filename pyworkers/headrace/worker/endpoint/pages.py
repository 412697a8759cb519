"""What each path of the endpoint answers, and to whom. Every refusal says in words what would be right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.worker.endpoint import exposition
from headrace.worker.endpoint.process import of_process
from headrace.worker.endpoint.profiler import MOST_S, Profiler, ProfileRuns
from headrace.worker.endpoint.stacks import stacks
from headrace.worker.endpoint.watched import StandsStill, WatchedWorker

PATHS = ("/livez", "/readyz", "/metrics", "/debug/stack", "/debug/profile")
PROFILE_S = 10  # where nobody says for how long
TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpPage:
    """An answer."""

    status: int
    text: str
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def said(code: int, /, **fields: str) -> HttpPage:
    return HttpPage(code, json.dumps(fields) + "\n")


class Pages:
    """The pages of one worker."""

    def __init__(self, watched: WatchedWorker, profiler: Profiler | None = None) -> None:
        self._watched = watched
        self._profiler = profiler or Profiler()

    async def page(
        self, path: str, query: Sequence[tuple[str, str]], stranger: str | None
    ) -> HttpPage:
        """For whoever asks; `stranger` says why that is no process of this machine, if so."""
        if path not in PATHS:
            return said(404, message=f"there is {', '.join(PATHS)} here, and nothing else")
        if path.startswith("/debug/") and stranger is not None:
            return said(403, message=f"{path} is for processes of this machine: {stranger}")
        try:
            match path:
                case "/livez":
                    return await self._live()
                case "/readyz":
                    return await self._ready()
                case "/metrics":
                    return await self._metrics()
                case "/debug/stack":
                    return HttpPage(200, stacks(self._watched.loop), TEXT)
                case _:
                    return await self._profile(query)
        except StandsStill as error:
            return said(503, status="stands still", message=str(error))

    async def _live(self) -> HttpPage:
        """Whoever restarts what does not live asks this: a model that is being loaded is no reason."""
        await self._watched.report()
        return said(200, status="ok")

    async def _ready(self) -> HttpPage:
        report = await self._watched.report()
        if report is None:
            return said(503, status="loading", message="the model is being loaded")
        if report.draining:
            return said(503, status="draining", message="the worker leaves")
        if report.joined == 0:
            return said(503, status="joining", message="no router has taken the worker yet")
        return said(200, status="ready")

    async def _metrics(self) -> HttpPage:
        report = await self._watched.report()
        families = [*exposition.of_worker(report), *of_process()]
        return HttpPage(200, exposition.page(families), exposition.CONTENT_TYPE)

    async def _profile(self, query: Sequence[tuple[str, str]]) -> HttpPage:
        try:
            seconds = profile_seconds(query)
        except ValueError as error:
            return said(400, message=str(error))
        try:
            return HttpPage(200, await self._profiler.profile(seconds), TEXT)
        except ProfileRuns as error:
            left_s = math.ceil(error.left_s)
            message = f"a profile runs already, for {left_s} s more at most: ask again then"
            return HttpPage(
                429, json.dumps({"message": message}) + "\n", headers={"Retry-After": str(left_s)}
            )


def profile_seconds(query: Sequence[tuple[str, str]]) -> int:
    """`seconds=N`, or nothing. Raises `ValueError`."""
    if not query:
        return PROFILE_S
    [(name, text), *more] = query
    if name != "seconds" or more:
        raise ValueError("the query is seconds=N, once, and nothing else")
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MOST_S):
        raise ValueError(f"seconds is {text[:40]!r}; write a whole number from 1 to {MOST_S}")
    return int(text)

"""What the process spends its time on: a look at the stacks of all threads, a hundred times a second, for a while.

The result is text in the form that flame graphs are drawn from: `thread;outer;inner COUNT`, a line for each stack that
was seen. Threads that wait are seen waiting. One profile runs at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from types import CodeType, FrameType

from headrace.worker.endpoint.stacks import thread_frames

MOST_S = 60
EVERY_S = 0.01
MOST_FRAMES = 96  # of a stack; what is further out is left out
MOST_STACKS = 4096  # of a profile; what is seen after that is one line. Both bound the memory: some 10 MB at worst
OTHER = "(other stacks)"


class ProfileRuns(Exception):
    """There is one already, for so many seconds more at most."""

    def __init__(self, left_s: float) -> None:
        super().__init__(left_s)
        self.left_s = left_s


class Profiler:
    """The profiles of this process. Used from one event loop, whose own thread is left out of them."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._pause = pause
        self._until_s: float | None = None

    async def profile(self, seconds: float) -> str:
        """Raises `ProfileRuns`. A call that is cancelled makes room at once."""
        began_s = self._clock()
        if self._until_s is not None:
            raise ProfileRuns(max(self._until_s - began_s, 0.0))
        self._until_s = began_s + seconds
        seen: Counter[str] = Counter()
        labels: dict[CodeType, str] = {}
        own = threading.get_ident()
        try:
            while self._clock() < self._until_s:
                for name, ident, frame in thread_frames():
                    if ident != own:
                        stack = f"{name.replace(';', ',')};{_folded(frame, labels)}"
                        seen[stack if stack in seen or len(seen) < MOST_STACKS else OTHER] += 1
                await self._pause(EVERY_S)
        finally:
            self._until_s = None
        return "".join(f"{stack} {count}\n" for stack, count in sorted(seen.items()))


def _folded(frame: FrameType | None, labels: dict[CodeType, str]) -> str:
    """The stack that ends with this frame, the outermost function first."""
    inner: list[str] = []
    while frame is not None and len(inner) < MOST_FRAMES:
        code = frame.f_code
        if (label := labels.get(code)) is None:
            place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
            label = labels[code] = f"{code.co_qualname} ({place})".replace(";", ",")
        inner.append(label)
        frame = frame.f_back
    return ";".join(reversed(inner))

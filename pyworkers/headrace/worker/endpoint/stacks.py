"""Where every thread of the process is now, and every task of the worker's loop: `/debug/stack`.

All of it is read from another thread, so that it can be had of a worker that stands still.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from itertools import islice
from types import FrameType

MOST_TASKS = (
    256  # of one page. A guess: a worker has some ten, and a few for each router and each pull
)
MOST_FRAMES = 96  # of a stack; what is further out is left out


def thread_frames() -> list[tuple[str, int, FrameType]]:
    """Name and number of each thread, and what it is at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  there is no other way to them
    return [(names.get(ident, "unnamed"), ident, frame) for ident, frame in frames.items()]


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Text for a person. Without a loop there are no tasks to show."""
    parts: list[str] = []
    for name, ident, frame in thread_frames():
        stack = "".join(traceback.format_stack(frame, limit=-MOST_FRAMES))
        parts.append(f"thread {name} ({ident})\n{stack}")
    if loop is not None:
        parts += _tasks(loop)
    return "\n".join(parts)


def _tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    tasks = sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name)
    parts: list[str] = []
    for task in islice(tasks, MOST_TASKS):
        frames = task.get_stack(limit=MOST_FRAMES)
        lines = "".join(line for f in frames for line in traceback.format_stack(f, limit=1))
        parts.append(f"task {task.get_name()}\n{lines}")
    if len(tasks) > MOST_TASKS:
        parts.append(f"and {len(tasks) - MOST_TASKS} tasks more\n")
    return parts

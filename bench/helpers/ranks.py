"""Ranks of a group as processes, which measure block after block."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any


class Ranks:
    """A process a rank. `serve` gets the arguments of its rank and a pipe.

    It says "ready", then answers each task that the pipe brings with the microseconds of that block. `None` ends it.
    """

    def __init__(self, serve: Callable[..., None], of_ranks: Iterable[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[Any, Connection]] = []
        for arguments in of_ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(*arguments, theirs), daemon=True)
            process.start()
            self._processes.append((process, ours))
        assert {pipe.recv() for _, pipe in self._processes} == {"ready"}

    def block_us(self, *task: Any) -> float:
        """Of the slowest rank."""
        for _, pipe in self._processes:
            pipe.send(task)
        return max(pipe.recv() for _, pipe in self._processes)

    def close(self) -> None:
        for process, pipe in self._processes:
            pipe.send(None)
            process.join()

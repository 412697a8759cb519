"""Ranks of a group as processes, which are started once and used by many tests."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.forked import FORKED

ANSWER_S = 60.0  # of a rank; passed only where one hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank of which group a process is to be."""

    rank: int
    ranks: int
    name: str  # that no other group has
    folder: Path  # that all ranks see

    @property
    def memory(self) -> Path:
        return Path("/dev/shm") / self.name


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank ended with."""

    kind: str
    text: str
    rank: int | None  # that the exception names
    trace: str


class Ended:
    """The process of a rank is no more."""


Work = Callable[..., Any]  # at the top of a module; its first argument is the `Place`


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        work, place, arguments = task
        try:
            answer = work(place, *arguments)
        except Exception as error:
            trace = traceback.format_exc()
            rank = getattr(error, "rank", None)
            answer = Raised(type(error).__name__, str(error), rank, trace)
        pipe.send(answer)


@dataclass(slots=True)
class _Process:
    process: BaseProcess
    pipe: Connection

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_S), "a rank hangs"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return Ended()


class RankProcesses:
    """As many processes as the largest group so far had; those that died are replaced."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []

    def start(self, ranks: int) -> list[_Process]:
        self._processes = [p for p in self._processes if p.process.is_alive()]
        started: list[_Process] = []
        while len(self._processes) < ranks:
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(_Process(process, ours))
            started.append(self._processes[-1])
        for process in started:
            assert process.answer() == "ready"
        return self._processes[:ranks]

    def run(self, work: Work, ranks: int, *arguments: Any, stopped: int | None = None) -> list[Any]:
        """What `work` gives on each rank: a `Raised` where it raised, `Ended` where the process did.

        The rank `stopped` stops itself meanwhile. It is not waited for, and killed after the others.
        """
        name = f"headrace-test-{os.getpid()}-{uuid.uuid4().hex}"
        processes = self.start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank, process in enumerate(processes):
                place = Place(rank=rank, ranks=ranks, name=name, folder=Path(folder))
                process.pipe.send((work, place, arguments))
            answers = [
                Ended() if rank == stopped else process.answer()
                for rank, process in enumerate(processes)
            ]
            for process, answer in zip(processes, answers, strict=True):
                if isinstance(answer, Ended):
                    process.process.kill()
                    process.process.join()
        assert not list(Path("/dev/shm").glob(f"{name}*")), "nothing is left"
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.process.kill()
            process.process.join()
            process.pipe.close()


@contextmanager
def rank_processes() -> Generator[RankProcesses]:
    processes = RankProcesses()
    try:
        yield processes
    finally:
        processes.close()


def end() -> None:
    """This process ends as if it was killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """This process stands still until it is killed."""
    os.kill(os.getpid(), signal.SIGSTOP)

"""Ranks of a group as threads of one process: one computes at a time, and they meet where parcels are exchanged."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import Arrived, Columns, Span

T = TypeVar("T")
DEADLINE_S = 60.0  # of a meeting; what is passed only when a rank failed


class Threads:
    """What the ranks share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._meeting = threading.Barrier(ranks)
        self._computing = threading.Lock()  # Triton's interpreter is of one thread
        self._boxes: list[list[Columns]] = [[] for _ in range(ranks)]

    def run(self, work: Callable[[ThreadTransport], T]) -> list[T]:
        """What `work` gives on each rank."""

        def of(rank: int) -> T:
            with self._computing:
                try:
                    return work(ThreadTransport(self, rank))
                except BaseException:
                    self._meeting.abort()  # the others are not to wait
                    raise

        with ThreadPoolExecutor(self.ranks) as threads:
            ran = [threads.submit(of, rank) for rank in range(self.ranks)]
        errors = [one.exception() for one in ran]
        # Who fails breaks the meeting for all others, also for those that are about to leave it.
        for error in sorted(
            filter(None, errors), key=lambda it: isinstance(it, threading.BrokenBarrierError)
        ):
            raise error
        return [one.result() for one in ran]

    def swap(self, rank: int, parcels: Sequence[Columns]) -> list[Columns]:
        self._boxes[rank] = list(parcels)
        self._meet()
        got = [box[rank] for box in self._boxes]
        self._meet()  # nobody posts before all have taken theirs
        return got

    def _meet(self) -> None:
        self._computing.release()
        try:
            self._meeting.wait(DEADLINE_S)
        finally:
            self._computing.acquire()


class ThreadTransport:
    """One rank's `Transport`."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self.rank = rank
        self.sent_bytes = 0  # to others

    @property
    def ranks(self) -> int:
        return self._threads.ranks

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        assert len(parcels) == self.ranks
        boxes = [tuple(column[start:end] for column in columns) for start, end in parcels]
        self.sent_bytes += sum(
            part.nbytes for to, box in enumerate(boxes) if to != self.rank for part in box
        )

        def wait() -> Arrived:
            got = self._threads.swap(self.rank, boxes)
            together = tuple(torch.cat(column) for column in zip(*got, strict=True))
            return Arrived(together, [len(box[0]) for box in got])

        return wait

    def begin(self, round_number: int) -> None:
        """Threads meet at each parcel: there is nothing left of a round before."""

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        """The threads own nothing."""


def random_placement(experts: int, ranks: int, spare: int, seed: int) -> LayerPlacement:
    """Each expert somewhere, in any order, and up to `spare` replicas."""
    draw = random.Random(seed)
    held: list[list[int]] = [[] for _ in range(ranks)]
    for i, expert in enumerate(draw.sample(range(experts), experts)):
        held[i % ranks].append(expert)
    for _ in range(spare):
        rank = draw.randrange(ranks)
        if others := set(range(experts)).difference(held[rank]):
            held[rank].append(draw.choice(sorted(others)))
    for slots in held:
        draw.shuffle(slots)
    return LayerPlacement(experts, tuple(map(tuple, held)))

"""Which rank of a group is lost, found through a store that all ranks reach: it costs nothing until something is wrong.

Whoever gives up calls the roll. Ranks that wait look for such a call now and then and answer it. Who does not answer
is lost, and the first verdict counts for all ranks. Where the store itself is lost, it is the rank that keeps it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from headrace_kernels.moe.transport import RankLost

T = TypeVar("T")
ANSWER_S = 1.0  # for a rank that waits, and looks far more often, and for the store
LOOK_S = 0.02
KEEPER = 0  # the rank whose process keeps the store

CALLED, VERDICT = "called", "verdict"


class RollCall:
    """One rank's end."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._answered = False

    def verdict(self, place: str) -> RankLost | None:
        """To be asked now and then by a rank that waits at `place`: which rank is lost, where that is known."""
        with contextlib.suppress(
            TimeoutError, RuntimeError
        ):  # a broken store shows when the roll is called
            return _within(ANSWER_S, lambda: self._look(place))
        return None

    def call(self, place: str, waited: str) -> RankLost:
        """Nobody came to `place`, and `waited` says how long: which rank it is."""
        try:
            _within(ANSWER_S, lambda: self._ask(place))
            until = time.monotonic() + ANSWER_S
            while True:
                absent, left, verdict = _within(ANSWER_S, self._count)
                if verdict:
                    return verdict
                if left:
                    return self.settle(RankLost(left[0], f"{place}, it left the group"))
                if not absent or time.monotonic() >= until:
                    break
                time.sleep(LOOK_S)
            others = [rank for rank in range(self._ranks) if rank != self._rank]
            return self.settle(RankLost((absent or others)[0], f"{place}, {waited}"))
        except (TimeoutError, RuntimeError):
            return RankLost(KEEPER, f"{place}, {waited}; the store of the group does not answer")

    def settle(self, lost: RankLost) -> RankLost:
        """The verdict of the group: this one where there was none."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            text = f"{lost.rank} {lost.waited_for}"
            first = _within(ANSWER_S, lambda: self._store.compare_set(VERDICT, "", text))
            return _read(first)
        return lost

    def leave(self, lost: RankLost | None) -> None:
        """This rank goes: whoever waits for it is told. The keeper goes when all know whom they lost, or soon."""

        def tell() -> None:
            self._store.set(_knows(self._rank) if lost else _left(self._rank), "")
            self._store.set(CALLED, "")

        with contextlib.suppress(TimeoutError, RuntimeError):
            _within(ANSWER_S, tell)
            if lost and self._rank == KEEPER:
                others = [_knows(rank) for rank in range(self._ranks) if rank != lost.rank]
                until = time.monotonic() + 2 * ANSWER_S
                while time.monotonic() < until:
                    if _within(ANSWER_S, lambda: self._store.check(others)):
                        return
                    time.sleep(LOOK_S)

    def _look(self, place: str) -> RankLost | None:
        if not self._store.check([CALLED]):
            return None
        if not self._answered:
            self._ask(place)
            return None  # what is on its way may still come
        _, left, verdict = self._count()
        if verdict is None and left:
            verdict = self.settle(RankLost(left[0], f"{place}, it left the group"))
        return verdict

    def _ask(self, place: str) -> None:
        self._store.set(_here(self._rank), place)
        self._store.set(CALLED, "")
        self._answered = True

    def _count(self) -> tuple[list[int], list[int], RankLost | None]:
        """Ranks that did not answer, ranks that left, and the verdict."""
        ranks = range(self._ranks)
        absent = [rank for rank in ranks if not self._store.check([_here(rank)])]
        left = [rank for rank in ranks if self._store.check([_left(rank)])]
        known = self._store.check([VERDICT])
        return absent, left, _read(self._store.get(VERDICT)) if known else None


def _here(rank: int) -> str:
    return f"here/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _knows(rank: int) -> str:
    return f"knows/{rank}"


def _read(verdict: bytes) -> RankLost:
    rank, _, waited_for = verdict.decode().partition(" ")
    return RankLost(int(rank), waited_for)


class _Answer(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self.ready: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()
        self._call = call

    def find(self) -> None:
        try:
            self.ready.put(self._call())
        except BaseException as error:
            self.ready.put(error)


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` gives; TimeoutError where that takes longer, as with a store whose keeper stands still."""
    answer = _Answer(call)
    threading.Thread(target=answer.find, daemon=True, name="ask-store").start()
    try:
        found = answer.ready.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, BaseException):
        raise found
    return found

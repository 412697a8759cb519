"""Ranks of a group as threads that meet: a `Lockstep` and a `Transport` that check that all ranks do the same.

In `run` ranks compute one at a time and give that up where they wait: what fails, fails in the same way each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from headrace.engine.step.lockstep import RankLoad
from headrace_kernels.moe.transport import Arrived, Columns, RankLost, Span, StepAborted

T = TypeVar("T")
DEADLINE_S = 30.0  # of a meeting: what is passed only where a test fails


class ThreadGroup:
    """What the ranks share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.changed = threading.Condition()
        self.computing: threading.Lock | None = None
        self.met: dict[tuple[int, int], dict[int, tuple[str, Any]]] = {}  # by round and place in it
        self.aborted: dict[int, StepAborted] = {}  # by round
        self.gone: RankLost | None = None
        self.members = [Member(self, rank) for rank in range(ranks)]

    def run(self, work: Callable[[Member], T]) -> list[T]:
        """What `work` gives on each rank, each on a thread of its own. Raises what the first one that fails does."""

        self.computing = computing = threading.Lock()

        def of(member: Member) -> T:
            with computing:
                try:
                    return work(member)
                except BaseException:
                    member.leave()
                    raise

        with ThreadPoolExecutor(self.ranks) as threads:
            futures = [threads.submit(of, member) for member in self.members]
        errors = [e for future in futures if (e := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, RankLost)):
            raise error
        return [future.result() for future in futures]

    def until_asleep(self) -> None:
        """Wait until all ranks found that none has work."""
        with self.changed:
            asleep = self.changed.wait_for(
                lambda: all(it.asleep for it in self.members), DEADLINE_S
            )
        assert asleep, "the group does not come to rest"

    def meet(
        self, rank: int, at: tuple[int, int], what: str, value: Any
    ) -> Callable[[], list[Any]]:
        """Bring `value` to a meeting. What is returned waits for the values of all ranks."""
        with self.changed:
            self._check(at[0], of_round=what != "agree")
            there = self.met.setdefault(at, {})
            assert all(what == other for other, _ in there.values()), (
                f"rank {rank} comes to {what}, others to {there}"
            )
            there[rank] = what, value
            self.changed.notify_all()
            if what == "agree" and len(there) == 1:
                self._wake(at[0], rank)

        def wait() -> list[Any]:
            if self.computing is not None:
                self.computing.release()
            try:
                with self.changed:
                    return self._wait(at, what)
            finally:
                if self.computing is not None:
                    self.computing.acquire()

        return wait

    def _wait(self, at: tuple[int, int], what: str) -> list[Any]:
        there = self.met[at]
        until_s = time.monotonic() + DEADLINE_S
        while len(there) < self.ranks:
            self._check(at[0], of_round=what != "agree")
            if not self.changed.wait(until_s - time.monotonic()):
                missing = next(rank for rank in range(self.ranks) if rank not in there)
                raise RankLost(missing, f"{what} of round {at[0]}")
        return [there[rank][1] for rank in range(self.ranks)]

    def _check(self, number: int, *, of_round: bool) -> None:
        if of_round and number in self.aborted:
            raise self.aborted[number]
        if self.gone is not None:
            raise self.gone

    def _wake(self, number: int, rank: int) -> None:
        for member in self.members:
            if member.rank != rank and member.number < number and member.slept and member.call:
                member.call()


class Member:
    """One rank's `Lockstep`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.ranks = group.ranks
        self.waited_s = 0.0
        self.number = 0  # of the round
        self._place = 0  # in the round
        self.slept = True
        self.call: Callable[[], None] | None = None
        self.counts: dict[str, int] = {}  # of meetings, by kind
        self.loads: list[list[RankLoad]] = []  # of each round
        self.fail_at: dict[str, Exception] = {}  # raised once at the next meeting of this kind
        self.transport = MemberTransport(self)

    @property
    def asleep(self) -> bool:
        with self._group.changed:
            others = self._group.met.get((self.number + 1, 0), {})
            woken = any(rank != self.rank for rank in others) or self._group.gone is not None
            return self.slept and not woken

    def on_wake(self, call: Callable[[], None] | None) -> None:
        self.call = call

    def agree(self, load: RankLoad) -> list[RankLoad]:
        self.number, self._place = self.number + 1, 0
        loads: list[RankLoad] = self.meet("agree", load)()
        with self._group.changed:
            self.slept = not any(it.rows or it.drafts_first for it in loads)
            self.loads.append(loads)
            self._group.changed.notify_all()
        return loads

    def agree_depth(self, depth: int) -> int:
        return max(self.meet("depth", depth)())

    def abort(self, error: BaseException) -> None:
        with self._group.changed:
            reason = f"{type(error).__name__}: {error}"
            self._group.aborted.setdefault(self.number, StepAborted(self.rank, reason))
            self._group.changed.notify_all()

    def leave(self) -> None:
        """As if the process were killed."""
        with self._group.changed:
            self._group.gone = self._group.gone or RankLost(self.rank, "its process ended")
            self._group.changed.notify_all()
            for member in self._group.members:
                if member.call is not None:
                    member.call()

    def exchange(self, what: str) -> None:
        """A meeting without parcels, for models without experts."""
        self.meet(what, None)()

    def meet(self, what: str, value: Any) -> Callable[[], list[Any]]:
        self.counts[what] = self.counts.get(what, 0) + 1
        if error := self.fail_at.pop(what, None):
            raise error
        at = self.number, self._place
        self._place += 1
        return self._group.meet(self.rank, at, what, value)


class MemberTransport:
    """One rank's `Transport`: its parcels meet as everything else does."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.rank = member.rank
        self.ranks = member.ranks

    def begin(self, round_number: int) -> None:
        """An agreement begins a round."""

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        assert len(parcels) == self.ranks
        sent = [tuple(column[start:end].clone() for column in columns) for start, end in parcels]
        wait = self._member.meet("parcels", sent)

        def arrived() -> Arrived:
            got: list[Columns] = [boxes[self.rank] for boxes in wait()]
            together = tuple(torch.cat(column) for column in zip(*got, strict=True))
            return Arrived(together, [len(box[0]) for box in got])

        return arrived

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)  # a lockstep aborts

    def close(self) -> None:
        """Threads own nothing."""

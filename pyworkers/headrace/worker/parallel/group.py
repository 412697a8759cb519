"""This rank's end of its group: the `Lockstep` of the engine, on control links to rank 0.

A thread that waits for its group reads the links itself. Otherwise a thread of their own watches them: while the group
is asleep, and while this rank computes or waits for parcels. So a rank that hangs up is noticed at once, and nothing
spins.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.agreement import Leader, Member, Outgoing
from headrace.worker.parallel.control import ControlBroken, ControlLink, named
from headrace.worker.parallel.messages import BadMessage, Kind, Message
from headrace_kernels.moe.transport import Arrived, Columns, RankLost, Span, Transport
from headrace_kernels.transport.choose import ChosenWays

T = TypeVar("T")

LOOK_S = 1.0  # between looks whether another thread learnt that the group is over
NAMING_S = 2.0  # longer than rank 0 the others wait, as it knows whom all wait for; a guess
MOST_REASON = 1000  # letters of what is told of an error


class RankGroup:
    """One rank of a group. `links` are by rank: rank 0 has one to each other rank, these have one to rank 0."""

    def __init__(
        self, rank: int, ranks: int, links: Mapping[int, ControlLink], *, timeout_s: float
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._member = Member(rank, ranks)
        self._leader = Leader(ranks) if rank == 0 else None
        self._ways: ChosenWays | None = None
        self._waited_s = 0.0
        self._state = (
            threading.Lock()
        )  # of leader, member and the sending ends; never held for long
        self._reading = threading.Lock()  # of the receiving ends; held by a thread that waits
        self._calls: dict[str, Callable[[], None] | None] = {}
        self._closed = False
        self._sockets = selectors.DefaultSelector()
        for other, link in self._links.items():
            self._sockets.register(link.socket, selectors.EVENT_READ, other)
        self._wakes, self._wake = os.pipe()
        self._watched = selectors.DefaultSelector()
        self._watched.register(self._sockets, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]
        self._watched.register(self._wakes, selectors.EVENT_READ)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    # --- the engine's side ---

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def asleep(self) -> bool:
        return self._member.asleep

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def agree(self, load: RankLoad) -> list[RankLoad]:
        self.check()
        number = self._member.round + 1
        if self._ways is not None:  # sooner than any rank can send a parcel of this round
            self._ways.begin(number)
        self._say(lambda: self._member.begin(load))
        where = f"for its load of round {number}"
        loads = self._wait(self._member.loads, where, self._timeout_s)
        if self._ways is not None:
            self._ways.expect(max(load.rows for load in loads))
        return loads

    def agree_depth(self, depth: int) -> int:
        self._say(lambda: self._member.depth(depth))
        where = f"for its drafting passes in round {self._member.round}"
        return self._wait(self._member.agreed_depth, where, self._timeout_s)

    def abort(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"[:MOST_REASON]
        if self._ways is not None:
            self._ways.abort(reason)
        self._say(lambda: self._member.abort(reason))

    def on_wake(self, call: Callable[[], None] | None) -> None:
        self._calls["wake"] = call

    # --- the worker's side ---

    def watch(self, transport: Transport) -> Transport:
        """What the model is to use of it: waits there count, and the group names one lost rank."""
        return WatchedTransport(transport, self)

    def carry_by(self, ways: ChosenWays) -> None:
        """Use these ways for the rows of each round."""
        self._ways = ways

    def meet_facts(
        self, facts: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """What all ranks bring, in their order. Before the first round."""
        self._say(lambda: self._member.meet(json.dumps(dict(facts))))
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return json.loads(self._wait(self._member.facts, "to say what it has loaded", within_s))

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called, on any thread, when the group is over. `check` says why."""
        self._calls["lost"] = call

    def check(self) -> None:
        """Raises RankLost where the group is over."""
        if self._member.lost is not None:
            raise self._member.lost

    def lose(self, lost: RankLost) -> None:
        """This rank found another one missing, such as in an exchange: have all ranks name the same one."""
        with self._noticing(), self._state:
            self._tell(messages.about_rank(Kind.LOST, 0, lost.rank, lost.waited_for))
            self._member.lose(lost.rank, lost.waited_for)

    def waited(self, seconds: float) -> None:
        """So long this rank was kept waiting, wherever that was."""
        self._waited_s += seconds

    def close(self) -> None:
        """Hang up. Ranks that still are in the group lose this one."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake, b"x")
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for link in self._links.values():
            link.close()
        if self._ways is not None:
            self._ways.close()
        self._sockets.close()
        self._watched.close()
        os.close(self._wakes)
        os.close(self._wake)

    # --- messages ---

    def _say(self, make: Callable[[], Message]) -> None:
        """Tell rank 0. Where the group is over, whoever waits hears of it."""
        with self._noticing(), self._state:
            self._tell(make())

    def _tell(self, message: Message) -> None:
        if self._leader is None:
            self._send(0, message)
        else:
            self._lead(0, message)

    def _lead(self, rank: int, message: Message) -> None:
        """Rank 0: take in what a rank says, and pass on what follows. Raises ControlBroken."""
        assert self._leader is not None
        try:
            self._deliver(self._leader.take(rank, message, time.monotonic()))
        except BadMessage as error:
            raise ControlBroken(f"sent {error}") from error

    def _deliver(self, out: Outgoing) -> None:
        for ranks, message in out:
            for rank in ranks:
                if rank == self._rank:
                    self._member.take(message)
                else:
                    self._send(rank, message)

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._links[rank].send(message.packed(), self._timeout_s)
        except ControlBroken as error:
            self._broken(rank, str(error))

    def _broken(self, rank: int, how: str) -> None:
        """A link is of no more use. Rank 0 tells the others."""
        if self._member.left:
            return
        if self._leader is not None:
            self._deliver(self._leader.lost(rank, how))
        self._member.lose(rank, how)

    def _read(self) -> None:
        """Take in what has come on the links."""
        for key, _ in self._sockets.select(0):
            self._read_link(key.data)

    def _read_link(self, rank: int) -> None:
        with self._noticing(), self._state:
            try:
                for message in self._links[rank].read():
                    if self._leader is not None:
                        self._lead(rank, message)
                        continue
                    try:
                        self._member.take(message)
                    except BadMessage as error:
                        raise ControlBroken(f"sent {error}") from error
            except ControlBroken as error:
                with contextlib.suppress(KeyError):
                    self._sockets.unregister(self._links[rank].socket)  # it stays readable
                self._broken(rank, str(error))

    @contextlib.contextmanager
    def _noticing(self) -> Generator[None]:
        """Call those who are to know, without a lock, where the state of this rank changed."""
        member = self._member
        asleep, lost = member.asleep, member.lost
        yield
        if member.lost is not lost:
            if self._ways is not None:
                self._ways.close()  # who waits there for that rank waits no longer
            self._call("lost")
        if (asleep and not member.asleep) or member.lost is not lost:
            self._call("wake")

    def _call(self, what: str) -> None:
        call = self._calls.get(what)
        if call is not None:
            call()

    # --- threads ---

    def _wait(self, found: Callable[[], T | None], where: str, timeout_s: float) -> T:
        if (result := found()) is not None:
            return result
        began_s = time.monotonic()
        try:
            with self._reading:
                self._watched.unregister(self._sockets)  # pyright: ignore[reportArgumentType]
                try:
                    while (result := found()) is None:
                        for key, _ in self._sockets.select(min(LOOK_S, timeout_s)):
                            self._read_link(key.data)
                        self._check_time(began_s, where, timeout_s)
                    return result
                finally:
                    self._watched.register(self._sockets, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]
        finally:
            self.waited(time.monotonic() - began_s)

    def _check_time(self, began_s: float, where: str, timeout_s: float) -> None:
        now_s = time.monotonic()
        if self._leader is None:
            if now_s - began_s > timeout_s + NAMING_S:
                self.lose(RankLost(0, f"{timeout_s:g} s were waited {where}"))
            return
        with self._state:
            awaited = self._leader.awaited()
        if awaited is not None and now_s - awaited.since_s > timeout_s:
            also = f", as for {named(awaited.missing[1:])}" if awaited.missing[1:] else ""
            self.lose(RankLost(awaited.missing[0], f"{timeout_s:g} s were waited {where}{also}"))

    def _watch(self) -> None:
        """Read what comes while nobody waits."""
        while True:
            ready = {key.fileobj for key, _ in self._watched.select()}
            if self._wakes in ready or self._closed:
                return
            with self._reading:
                self._read()


class WatchedTransport:
    """A transport whose waits count as the group's, and whose losses the whole group hears of."""

    def __init__(self, inner: Transport, group: RankGroup) -> None:
        self._inner = inner
        self._group = group

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def ranks(self) -> int:
        return self._inner.ranks

    def begin(self, round_number: int) -> None:
        with self._naming():
            self._inner.begin(round_number)

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        with self._naming():
            wait = self._inner.post(columns, parcels)

        def received() -> Arrived:
            with self._naming():
                return wait()

        return received

    @contextlib.contextmanager
    def _naming(self) -> Generator[None]:
        began_s = time.monotonic()
        try:
            yield
        except RankLost as lost:
            self._group.check()  # another rank may have been found missing sooner
            self._group.lose(lost)
            raise
        finally:
            self._group.waited(time.monotonic() - began_s)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

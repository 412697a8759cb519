"""This rank's end of its group: the `Lockstep` of the engine, on control links to rank 0.

A thread that waits for its group reads the links itself. Otherwise a thread of their own watches them: while the group
is asleep, and while this rank computes or waits for parcels. So a rank that hangs up is noticed at once, and nothing
spins. The same thread says now and then that this rank is there, whatever its other threads do, and notices ranks that
say so no more (`life_signs.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from headrace import _core
from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.agreement import Leader, Member, Outgoing
from headrace.worker.parallel.control import ControlBroken, ControlLink, named
from headrace.worker.parallel.life_signs import LifeSigns
from headrace.worker.parallel.messages import BadMessage, Kind, Message
from headrace_kernels.moe.dispatch import Combine
from headrace_kernels.moe.placement import Replicas
from headrace_kernels.moe.transport import (
    Arrived,
    Columns,
    NativeTransport,
    OnLost,
    RankLost,
    Span,
    Transport,
)
from headrace_kernels.transport.choose import ChosenWays

T = TypeVar("T")

LOOK_S = 1.0  # between looks at the clock of a thread that waits
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
        self._signs = LifeSigns(links, timeout_s, patience_s=0.0 if rank == 0 else NAMING_S)
        self._leader = Leader(ranks, self._signs) if rank == 0 else None
        self._ways: ChosenWays | None = None
        self._waited_s = 0.0
        self._waits_since_s: float | None = None  # for other ranks; None where it does not
        self._native: list[NativeTransport] = []  # whose waits are counted there
        self._state = (
            threading.Lock()
        )  # of leader, member and the sending ends; never held for long
        self._reading = threading.Lock()  # of the receiving ends; held by a thread that waits
        self._calls: dict[str, Callable[[], None] | None] = {}
        self._closed = False
        self._sockets = selectors.DefaultSelector()
        for other, link in self._links.items():
            self._sockets.register(link.socket, selectors.EVENT_READ, other)
        # Readable once the group is over, for good: whoever waits wakes, whichever thread learns of it.
        self._over, self._end = socket.socketpair()
        self._waited = selectors.DefaultSelector()
        self._waited.register(self._sockets, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]
        self._waited.register(self._over, selectors.EVENT_READ)
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
        return self._waited_s + sum(transport.waited_s for transport in self._native)

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
        if isinstance(transport, NativeTransport):
            self._native.append(transport)
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

    def show_life(self) -> None:
        """From now on all ranks say that they are there, and one that does not is lost. All have come so far."""
        with self._state:
            self._signs.start(time.monotonic())
        os.write(self._wake, b"x")

    def missed(self, lost: RankLost) -> None:
        """An exchange of this rank found another one missing: raise what all ranks say of it."""
        self.check()  # another rank may have been found missing sooner
        self.accuse(lost)

    def accuse(self, lost: RankLost) -> None:
        """This rank found another one missing in an exchange: raise the verdict of rank 0, the same on all ranks.

        Of several ranks that miss each other rank 0 knows best which of them only waits. Where it does not answer, this
        rank keeps to what it found.
        """
        self._say(lambda: messages.about_rank(Kind.LOST, 0, lost.rank, lost.waited_for))
        if self._leader is None:
            give_up_s = time.monotonic() + NAMING_S

            def settled() -> bool | None:
                return self._member.lost is not None or time.monotonic() > give_up_s or None

            self._read_until(settled, NAMING_S)
        with self._noticing(), self._state:
            self._member.lose(lost.rank, lost.waited_for)
        self.check()

    def _lose(self, lost: RankLost) -> None:
        """This rank knows that another one is lost, and on rank 0 that this is the one."""
        with self._noticing(), self._state:
            if self._leader is None:
                self._tell(messages.about_rank(Kind.LOST, 0, lost.rank, lost.waited_for))
            else:
                self._deliver(self._leader.lost(lost.rank, lost.waited_for))
            self._member.lose(lost.rank, lost.waited_for)

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """This rank is kept waiting by others, wherever that is."""
        began_s = self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None
            self._waited_s += time.monotonic() - began_s

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
        self._waited.close()
        self._sockets.close()
        self._watched.close()
        self._over.close()
        self._end.close()
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
                found = self._links[rank].read()
                self._signs.heard(rank)
                for message in found:
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
            with contextlib.suppress(OSError):  # this rank has hung up meanwhile
                self._end.send(b"x")
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

        def looked() -> T | None:
            if (result := found()) is None:
                self._check_time(began_s, where, timeout_s)
                result = found()
            return result

        with self.waiting():
            return self._read_until(looked, timeout_s)

    def _read_until(self, found: Callable[[], T | None], timeout_s: float) -> T:
        """Read the links on this thread until there is something, looking at least every `timeout_s`."""
        with self._reading:
            self._watched.unregister(self._sockets)  # pyright: ignore[reportArgumentType]
            try:
                while (result := found()) is None:
                    self._waited.select(min(LOOK_S, timeout_s))
                    self._read()
                return result
            finally:
                self._watched.register(self._sockets, selectors.EVENT_READ)  # pyright: ignore[reportArgumentType]

    def _check_time(self, began_s: float, where: str, timeout_s: float) -> None:
        now_s = time.monotonic()
        if self._leader is None:
            if now_s - began_s > timeout_s + NAMING_S:
                self._lose(RankLost(0, f"{timeout_s:g} s were waited {where}"))
            return
        with self._state:
            awaited = self._leader.awaited()
            if awaited is None or now_s - awaited.since_s <= timeout_s:
                return
            first = self._signs.likeliest(awaited.missing)
        others = [rank for rank in awaited.missing if rank != first]
        also = f", as for {named(others)}" if others else ""
        self._lose(RankLost(first, f"{timeout_s:g} s were waited {where}{also}"))

    def _watch(self) -> None:
        """Read what comes while nobody waits, and keep up the signs of life."""
        while True:
            ready = {key.fileobj for key, _ in self._watched.select(self._due_s())}
            if self._closed:
                return
            if self._wakes in ready:
                os.read(self._wakes, 1)
            # A thread that waits reads itself, for as long as it waits.
            if self._sockets in ready and self._reading.acquire(blocking=False):
                try:
                    self._read()
                finally:
                    self._reading.release()
            self._keep_up()

    @property
    def _owes_signs(self) -> bool:
        return self._signs.started and self._member.lost is None and not self._member.left

    def _due_s(self) -> float | None:
        with self._state:
            return self._signs.next_s(time.monotonic()) if self._owes_signs else None

    def _keep_up(self) -> None:
        """Say that this rank is there, and look who does not say so any more."""
        with self._noticing(), self._state:
            now_s = time.monotonic()
            if self._owes_signs and self._signs.beat_due(now_s):
                since_s = self._waits_since_s
                waits_s = 0.0 if since_s is None else now_s - since_s
                waits_s = max([waits_s, *(transport.waits_s for transport in self._native)])
                self._signs.waits(self._rank, waits_s)
                alive = Message(Kind.ALIVE, round(waits_s * 1e3))
                for rank, link in self._links.items():
                    if link.takes_more:  # otherwise it reads nothing, and is silent itself
                        self._send(rank, alive)
            self._signs.listened(now_s)
            lost = self._signs.lost() if self._owes_signs else None
        if lost is not None:
            self._lose(RankLost(*lost))


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

    def layer_exchange(
        self, home: Replicas, combine: Combine, on_lost: OnLost | None = None
    ) -> _core.SharedExchange | None:
        assert on_lost is None, "the group is told"
        if not isinstance(self._inner, NativeTransport):
            return None
        return self._inner.layer_exchange(home, combine, self._group.missed)

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s if isinstance(self._inner, NativeTransport) else 0.0

    @property
    def waits_s(self) -> float:
        return self._inner.waits_s if isinstance(self._inner, NativeTransport) else 0.0

    @contextlib.contextmanager
    def _naming(self) -> Generator[None]:
        try:
            with self._group.waiting():
                yield
        except RankLost as lost:
            self._group.missed(lost)
            raise

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

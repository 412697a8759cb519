"""Who begins what together: rank 0 collects what each rank brings to a round, and tells all ranks what all brought.

Pure: `Leader` is rank 0's, `Member` each rank's, rank 0's too. Both take messages in and give messages out; `now_s` is
an argument. A message that has no place raises `BadMessage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.life_signs import LifeSigns
from headrace.worker.parallel.messages import BadMessage, Kind, Message
from headrace_kernels.moe.transport import RankLost, StepAborted

Outgoing: TypeAlias = list[tuple[Iterable[int], Message]]
"""Messages, and the ranks that get each."""


@dataclass(slots=True)
class Collected:
    """What ranks brought to one meeting so far."""

    what: str
    by_rank: dict[int, bytes] = field(default_factory=dict[int, bytes])
    since_s: float = 0.0  # when the first came

    def add(self, rank: int, body: bytes, now_s: float) -> None:
        if not self.by_rank:
            self.since_s = now_s
        self.by_rank[rank] = body

    def clear(self) -> None:
        self.by_rank.clear()


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whom rank 0 waits for, since when, and for what."""

    missing: list[int]
    since_s: float
    what: str


class Leader:
    """Rank 0's side of all links, its own included."""

    def __init__(self, ranks: int, signs: LifeSigns) -> None:
        self.over: tuple[int, str] | None = None  # the rank that was lost, and how
        self._signs = signs
        self.left = False
        self._all = range(ranks)
        self._asleep = True
        self._round = 1  # that is collected
        self._aborted = 0  # the last round that was
        self._turn = 1  # in which drafting passes are agreed on
        self._meeting = 1
        self._loads = Collected("a load")
        self._depths = Collected("a number of drafting passes")
        self._facts = Collected("facts")

    def take(self, rank: int, message: Message, now_s: float) -> Outgoing:
        """Raises BadMessage."""
        match message.kind:
            case Kind.LOAD:
                return self._load(rank, message, now_s)
            case Kind.DEPTH:
                return self._depth(rank, message, now_s)
            case Kind.FACTS:
                return self._fact(rank, message, now_s)
            case Kind.ABORTED:
                return self._abort(rank, message)
            case Kind.LOST:
                accused, how = messages.read_about_rank(message, len(self._all))
                return self.lost(*self._signs.blamed(rank, accused, how))
            case Kind.ALIVE:
                self._signs.waits(rank, message.number / 1e3)
                return []
            case _:
                raise BadMessage(f"{message.kind.name}, which is not for rank 0")

    def lost(self, rank: int, how: str) -> Outgoing:
        """The group is over. What is said of a second rank is not passed on: the first took it along.

        The lost one is told, too: it may only have been late.
        """
        if self.over is not None or self.left:
            return []
        self.over = (rank, how)
        return [(self._all, messages.about_rank(Kind.LOST, 0, rank, how))]

    def awaited(self) -> Awaited | None:
        """Whom others have waited for longest; None where nobody waits."""
        waiting = [one for one in (self._loads, self._depths, self._facts) if one.by_rank]
        if not waiting:
            return None
        first = min(waiting, key=lambda one: one.since_s)
        missing = [rank for rank in self._all if rank not in first.by_rank]
        return Awaited(missing, first.since_s, f"{first.what} for round {self._round}")

    def _load(self, rank: int, message: Message, now_s: float) -> Outgoing:
        messages.check_load(message)
        if message.number != self._round:
            raise BadMessage(f"a load for round {message.number} in round {self._round}")
        if rank in self._loads.by_rank:
            raise BadMessage(f"two loads for round {self._round}")
        self._loads.add(rank, message.body, now_s)
        out: Outgoing = []
        if self._asleep:
            self._asleep = False
            out.append((self._others(rank), Message(Kind.WAKE, self._round)))
        if len(self._loads.by_rank) == len(self._all):
            bodies = [self._loads.by_rank[rank] for rank in self._all]
            everyones = Message(Kind.LOADS, self._round, b"".join(bodies))
            out.append((self._all, everyones))
            of_ranks = messages.read_loads(everyones, len(self._all))
            self._asleep, self.left = is_asleep(of_ranks), has_left(of_ranks)
            self._round += 1
            self._turn = 1
            self._loads.clear()
            self._depths.clear()
        return out

    def _depth(self, rank: int, message: Message, now_s: float) -> Outgoing:
        turn, _ = messages.read_depth(message)
        if message.number == self._aborted:
            return []  # sent before it knew
        if (message.number, turn) != (self._round - 1, self._turn):
            raise BadMessage(
                f"drafting passes of turn {turn} in round {message.number}, here is turn {self._turn} "
                f"in round {self._round - 1}"
            )
        if rank in self._depths.by_rank:
            raise BadMessage(f"two numbers of drafting passes for turn {turn}")
        self._depths.add(rank, message.body, now_s)
        if len(self._depths.by_rank) < len(self._all):
            return []
        most = max(messages.DEPTH.unpack(body)[1] for body in self._depths.by_rank.values())
        self._depths.clear()
        self._turn += 1
        return [(self._all, messages.depth(Kind.DEPTHS, message.number, turn, most))]

    def _fact(self, rank: int, message: Message, now_s: float) -> Outgoing:
        if message.number != self._meeting or rank in self._facts.by_rank:
            raise BadMessage(f"facts for meeting {message.number}, here is {self._meeting}")
        try:
            json.loads(message.body)
        except ValueError:
            raise BadMessage(f"facts that are no JSON: {message.body[:40]!r}") from None
        self._facts.add(rank, message.body, now_s)
        if len(self._facts.by_rank) < len(self._all):
            return []
        bodies = [self._facts.by_rank[rank] for rank in self._all]
        self._facts.clear()
        self._meeting += 1
        said = b"[" + b",".join(bodies) + b"]"
        return [(self._all, Message(Kind.ALL_FACTS, message.number, said))]

    def _abort(self, rank: int, message: Message) -> Outgoing:
        who, _ = messages.read_about_rank(message, len(self._all))
        if who != rank or message.number >= self._round:
            raise BadMessage(f"that rank {who} aborts round {message.number}")
        self._aborted = max(self._aborted, message.number)
        if message.number == self._round - 1:
            self._depths.clear()
        return [(self._others(rank), message)]

    def _others(self, rank: int) -> list[int]:
        return [one for one in self._all if one != rank]


class Member:
    """What one rank knows of its group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.round = 0  # the last that this rank began
        self.asleep = True
        self.left = False  # all ranks have, and hang up
        self.lost: RankLost | None = None
        self._rank = rank
        self._ranks = ranks
        self._turn = 0
        self._meeting = 0
        self._loads: list[RankLoad] | None = None
        self._depth: int | None = None
        self._facts: bytes | None = None
        self._aborted: StepAborted | None = None

    # --- what this rank does: the message for rank 0 ---

    def begin(self, load: RankLoad) -> Message:
        self.round += 1
        self._turn = 0
        self._loads = self._aborted = None
        return messages.load(self.round, load)

    def depth(self, passes: int) -> Message:
        self._turn += 1
        self._depth = None
        return messages.depth(Kind.DEPTH, self.round, self._turn, passes)

    def meet(self, facts: str) -> Message:
        self._meeting += 1
        self._facts = None
        return messages.text(Kind.FACTS, self._meeting, facts)

    def abort(self, reason: str) -> Message:
        return messages.about_rank(Kind.ABORTED, self.round, self._rank, reason)

    # --- what came of it; None: nothing as yet ---

    def loads(self) -> list[RankLoad] | None:
        self._check()
        return self._loads

    def agreed_depth(self) -> int | None:
        self._check()
        if self._aborted is not None:
            raise self._aborted
        return self._depth

    def facts(self) -> bytes | None:
        self._check()
        return self._facts

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def lose(self, rank: int, how: str) -> None:
        """The group is over, unless it is already, one way or the other."""
        if self.lost is None and not self.left:
            self.lost = RankLost(rank, how)
            self.asleep = False

    def take(self, message: Message) -> None:
        """From rank 0. Raises BadMessage."""
        match message.kind:
            case Kind.LOADS:
                self._expect(message, self.round, self._loads is None)
                self._loads = messages.read_loads(message, self._ranks)
                self.asleep, self.left = is_asleep(self._loads), has_left(self._loads)
            case Kind.DEPTHS:
                turn, passes = messages.read_depth(message)
                if self._aborted is None:
                    self._expect(message, self.round, turn == self._turn and self._depth is None)
                    self._depth = passes
            case Kind.ALL_FACTS:
                self._expect(message, self._meeting, self._facts is None)
                self._facts = message.body
            case Kind.WAKE:
                self.asleep = self.asleep and message.number <= self.round
            case Kind.ABORTED:
                who, reason = messages.read_about_rank(message, self._ranks)
                if message.number == self.round:  # otherwise this rank is done with that round
                    self._aborted = StepAborted(who, reason)
            case Kind.LOST:
                self.lose(*messages.read_about_rank(message, self._ranks))
            case Kind.ALIVE:
                pass
            case _:
                raise BadMessage(f"{message.kind.name}, which rank 0 does not send")

    def _expect(self, message: Message, number: int, there: bool) -> None:
        if message.number != number or not there:
            raise BadMessage(f"{message.kind.name} number {message.number}, here is {number}")


def is_asleep(loads: Iterable[RankLoad]) -> bool:
    """No rank had anything to compute."""
    return not any(load.rows or load.drafts_first for load in loads)


def has_left(loads: Iterable[RankLoad]) -> bool:
    """All ranks leave, and nothing is left to do."""
    return all(load.at_rest for load in loads)

"""What may happen to a rank of a group, in which order, and what a fleet has to be so that it can happen there."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from chaos.fleet import POLL_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupFault:
    """`kind` happens to one rank of a group: at the `nth` call of its phase, where it has one."""

    kind: str
    group: int
    rank: int
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done, and what has to come of it."""

    name: str
    named: str  # what a log says of it, as a pattern
    anew: bool = True  # the group begins anew; otherwise it goes on
    at_s: float = field(default_factory=time.monotonic)


class NotReached(AssertionError):
    """The rank did not come to the phase of a fault."""


class Ranks(Protocol):
    """A fleet of groups that can be broken. What `strike` does counts from the end of the logs before it."""

    port: int
    model: str

    @property
    def sizes(self) -> Sequence[int]:
        """Ranks of each group."""
        ...

    @property
    def kinds(self) -> Sequence[str]:
        """Of faults."""
        ...

    @property
    def back_within_s(self) -> float: ...

    async def strike(self, fault: GroupFault) -> Struck:
        """Raises NotReached."""
        ...

    async def named(self, fault: GroupFault) -> None:
        """A log has said which rank it was."""
        ...

    def logged(self) -> list[str]: ...

    async def left(self) -> list[str]:
        """What idle ranks hold and should not, beyond what they tell the router."""
        ...

    @property
    def crashed(self) -> int: ...


def plan(seed: int, ranks: Ranks) -> Iterator[GroupFault]:
    """Endless: every kind, in another order each time."""
    rng = random.Random(f"groups {seed}")
    for _ in itertools.count():
        for kind in rng.sample(ranks.kinds, len(ranks.kinds)):
            group = rng.randrange(len(ranks.sizes))
            yield GroupFault(kind, group, rng.randrange(ranks.sizes[group]), rng.randint(1, 8))


async def eventually(look: Callable[[], T | None], limit_s: float) -> T | None:
    """What `look` finds in time."""
    deadline_s = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            return None
        await asyncio.sleep(POLL_S)
    return found

"""What an attack is, what came of it, and the list of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.stack import Programs, Stack


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes, 1 for the full attack; and the seconds around it."""

    share: float = 1.0
    quiet_s: float = 3.0  # before each turn of the attack, to know what the others usually see
    least_s: float = 3.0  # of a turn: a short attack and what comes of it
    enough_s: float = (
        9.0  # of all turns: the others' p99 is that of 7,200 tokens, 72 of which are later
    )
    rest_s: float = 3.0  # after the last turn, until the memory that stays is read
    alone: bool = (
        True  # the machine has nothing else to do: the attacker takes only what everybody leaves
    )

    def of(self, full: int, least: int = 1) -> int:
        return max(least, round(full * self.share))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`held`: what had to hold did. Process, memory and the others are watched beside it, for every attack."""

    status: str
    held: bool


Run = Callable[[Stack, Scale], Coroutine[Any, Any, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack on a router that serves others meanwhile."""

    name: str
    run: Run
    most_mb: float  # that the router's memory may grow by, from the documented bounds
    slice_mb: float = 96.0  # and at a thirty-second of its size
    flags: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()  # before the router's command, such as `prlimit`
    template: str | None = None  # chat template of the model
    control: Run | None = (
        None  # the attacker's own work: the same bytes to a program that only reads
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An attack on processes of its own, with nobody beside it."""

    name: str
    run: Callable[[Programs, Path, Scale], Awaitable[Outcome]]  # with a description of the model

"""What goes wrong, and when: every fault at every protocol step and token position, in a seeded order. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN_POSITIONS = 24  # of an answer, at which a worker is killed

# Steps of a leg on its worker, in their order; `seams` says where each of them is.
WHOLE = (
    "submit",
    "admitted",
    "chunk",
    "first token",
    "first token sent",
    "first decode step",
    "decode",
    "token sent",
    "last step",
    "resumed",
)
PREFILL = (
    "submit",
    "admitted",
    "before ticket",
    "chunk",
    "first token",
    "first token sent",
    "segment served",
    "before freed",
)
DECODE = (
    "submit",
    "ticket",
    "admitted",
    "pull",
    "segment",
    "pulled",
    "released",
    "continue",
    "first decode step",
    "decode",
    "token sent",
    "last step",
    "resumed",
)

# What happens to a worker that reaches a step.
ON_WORKER = ("kill", "freeze", "freeze briefly", "slow", "cut link", "drain", "leave", "replace")
ON_NETWORK = (
    "partition",
    "half-open from worker",
    "half-open to worker",
    "delay",
    "loss",
    "no way between workers",
)
HANG_UPS = (
    "queued",
    "tokenising",
    "before dispatch",
    "mid-prefill",
    "between chunks",
    "before ticket",
    "during transfer",
    "between legs",
    "first token",
    "mid-decode",
    "in the last step",
    "after the last token",
)


KINDS = (*ON_WORKER, *ON_NETWORK, "hang up")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` happens to a worker of `role` when something reaches `point` there for the `nth` time from now on.

    A point "token k" is observed by a client: its k-th token has just arrived.
    """

    kind: str
    role: str
    point: str
    nth: int = 1

    @property
    def token(self) -> int | None:
        """The position, if that is what it waits for."""
        word, _, number = self.point.partition(" ")
        return int(number) if word == "token" and number.isdigit() else None

    @property
    def row(self) -> str:
        """Its name in the matrix."""
        return self.kind if self.role == "client" else f"{self.kind} {self.role}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What there is to break."""

    prefill: int
    decode: int
    both: int
    hosts: bool  # workers on hosts of their own, with a network that can fail

    @property
    def split(self) -> bool:
        return self.prefill > 0

    @property
    def workers(self) -> dict[str, str]:
        """Role by name."""
        numbers = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return {f"{role}-{i}": role for role, count in numbers.items() for i in range(count)}

    @property
    def points(self) -> list[tuple[str, str]]:
        """Role and step of each."""
        roles = {"prefill": PREFILL, "decode": DECODE, "both": WHOLE}
        present = set(self.workers.values())
        return [(role, point) for role in roles if role in present for point in roles[role]]

    @property
    def decoders(self) -> str:
        return "decode" if self.split else "both"


def place(point: str) -> tuple[int, str]:
    """Where a point stands in a list of them: as in the protocol, then token by token."""
    for i, known in enumerate((*PREFILL, *DECODE, *WHOLE, *HANG_UPS)):
        if point == known:
            return i, ""
    return 1_000, f"{point.rpartition(' ')[2]:>6}"


def matrix(shape: Shape) -> list[Fault]:
    """Each fault at each point once."""
    faults = [Fault(kind, role, point) for role, point in shape.points for kind in ON_WORKER]
    positions = [f"token {k}" for k in range(1, TOKEN_POSITIONS + 1)]
    faults += [Fault("kill", shape.decoders, position) for position in positions]
    faults += [Fault("freeze", shape.decoders, position) for position in positions[::6]]
    if shape.hosts:
        steps = ("submit", "segment", "decode") if shape.split else ("submit", "decode")
        kinds = ON_NETWORK if shape.split else ON_NETWORK[:-1]
        faults += [Fault(kind, shape.decoders, step) for kind in kinds for step in steps]
        if shape.split:
            steps = ("submit", "chunk", "segment served")
            faults += [Fault(kind, "prefill", step) for kind in ON_NETWORK for step in steps]
    split_only = {"before ticket", "during transfer", "between legs"}
    points = [point for point in HANG_UPS if shape.split or point not in split_only]
    return faults + [Fault("hang up", "client", point) for point in points]


def faults(seed: int, shape: Shape) -> Iterator[Fault]:
    """Endless: the whole matrix, in another order each time; after the first time at later occurrences.

    Every other fault is one more hang-up: they cost next to nothing, and many are needed to say how long they take.
    """
    rng = random.Random(f"faults {seed}")
    whole = matrix(shape)
    hang_ups = [f for f in whole if f.role == "client" and f.point != "queued"]
    for turn in itertools.count():
        for fault in rng.sample(whole, len(whole)):
            later = 1 if turn == 0 or fault.token else rng.randint(1, 12)
            yield Fault(fault.kind, fault.role, fault.point, later)
            yield rng.choice(hang_ups)

"""What ranks send each other on their control links: a head of fixed size, and a body whose size its kind bounds.

    magic u16 | kind u16 | bytes of the body u32 | number u64

The number is that of a round, of a meeting, or of a group's epoch, or milliseconds. All is little-endian. A kind that
nobody knows, or a body that is too long, raises `BadMessage` before the body is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

from headrace.engine.step.lockstep import RankLoad
from headrace.settings.parallel import MOST_RANKS

MAGIC = 0x7248
HEAD = struct.Struct("<HHIQ")
TOKEN_BYTES = 32
MOST_TEXT = 4096
MOST_FACTS = 1 << 16
NONE = -1  # stands for None in a load
LOAD = struct.Struct("<" + "".join("?" if f.type == "bool" else "q" for f in fields(RankLoad)))
LEAST = [NONE if "None" in str(f.type) else 0 for f in fields(RankLoad)]  # of each field
VALUES = attrgetter(*(f.name for f in fields(RankLoad)))
DEPTH = struct.Struct("<II")
RANK = struct.Struct("<I")


class Kind(IntEnum):
    """What a message says."""

    GREET = 1  # rank, token: the first message to rank 0; the number is the epoch
    GREETED = 2  # rank 0 takes the link
    REFUSED = 3  # text: it does not
    FACTS = 4  # text: what a rank brings to a meeting
    ALL_FACTS = 5  # text: what all bring
    LOAD = 6  # what a rank brings to a round
    LOADS = 7  # what all bring
    WAKE = 8  # a round begins; the group was asleep
    DEPTH = 9  # turn, drafting passes of a rank
    DEPTHS = 10  # turn, the most passes of any
    ABORTED = 11  # rank, text: the round is over
    LOST = 12  # rank, text: the group is over; to rank 0: a rank is missing
    ALIVE = (
        13  # the number is ms that the rank has waited for others so far, 0 where it does not wait
    )


LONGEST = {
    Kind.GREET: RANK.size + TOKEN_BYTES,
    Kind.GREETED: 0,
    Kind.REFUSED: MOST_TEXT,
    Kind.FACTS: MOST_FACTS,
    Kind.ALL_FACTS: MOST_FACTS * MOST_RANKS,
    Kind.LOAD: LOAD.size,
    Kind.LOADS: LOAD.size * MOST_RANKS,
    Kind.WAKE: 0,
    Kind.DEPTH: DEPTH.size,
    Kind.DEPTHS: DEPTH.size,
    Kind.ABORTED: RANK.size + MOST_TEXT,
    Kind.LOST: RANK.size + MOST_TEXT,
    Kind.ALIVE: 0,
}
"""Bytes of the body at most."""


class BadMessage(Exception):
    """These bytes are no message. The text continues "sent ..."."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, its body as bytes."""

    kind: Kind
    number: int
    body: bytes = b""

    def packed(self) -> bytes:
        return HEAD.pack(MAGIC, self.kind, len(self.body), self.number) + self.body


class Messages:
    """Puts messages together from what a socket gives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def partial(self) -> bool:
        """Part of a message is there."""
        return len(self._bytes) > 0

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises BadMessage."""
        self._bytes += data
        found: list[Message] = []
        start = 0
        while len(self._bytes) - start >= HEAD.size:
            magic, kind, length, number = HEAD.unpack_from(self._bytes, start)
            if magic != MAGIC or kind not in LONGEST:
                raise BadMessage(f"bytes that are no message: {bytes(self._bytes[start:][:16])!r}")
            known = Kind(kind)
            if length > LONGEST[known]:
                raise BadMessage(
                    f"{known.name} of {length} bytes, of which {LONGEST[known]} are allowed"
                )
            end = start + HEAD.size + length
            if len(self._bytes) < end:
                break
            found.append(Message(known, number, bytes(self._bytes[start + HEAD.size : end])))
            start = end
        del self._bytes[:start]
        return found


def greet(rank: int, epoch: int, token: bytes) -> Message:
    return Message(Kind.GREET, epoch, RANK.pack(rank) + token)


def load(number: int, of_rank: RankLoad) -> Message:
    values = [NONE if value is None else value for value in VALUES(of_rank)]
    return Message(Kind.LOAD, number, LOAD.pack(*values))


def depth(kind: Kind, number: int, turn: int, passes: int) -> Message:
    return Message(kind, number, DEPTH.pack(turn, passes))


def about_rank(kind: Kind, number: int, rank: int, text: str) -> Message:
    return Message(kind, number, RANK.pack(rank) + text.encode()[:MOST_TEXT])


def text(kind: Kind, number: int, said: str) -> Message:
    body = said.encode()
    if kind == Kind.FACTS:
        assert len(body) <= MOST_FACTS, "facts are few"
    return Message(kind, number, body[: LONGEST[kind]])


def check_load(message: Message) -> None:
    """Raises BadMessage."""
    if len(message.body) != LOAD.size:
        raise BadMessage(f"a load of {len(message.body)} bytes, it has {LOAD.size}")
    values = LOAD.unpack(message.body)
    if any(value < least for value, least in zip(values, LEAST, strict=True)):
        raise BadMessage(f"a load that cannot be: {values}")


def read_loads(message: Message, ranks: int) -> list[RankLoad]:
    """Raises BadMessage."""
    if len(message.body) != LOAD.size * ranks:
        raise BadMessage(f"loads of {len(message.body)} bytes, {ranks} have {LOAD.size * ranks}")
    return [_load_of(values) for values in LOAD.iter_unpack(message.body)]


def _load_of(values: tuple[Any, ...]) -> RankLoad:
    found: list[Any] = [None if value == NONE else value for value in values]
    return RankLoad(*found)


def read_depth(message: Message) -> tuple[int, int]:
    """Turn and passes. Raises BadMessage."""
    if len(message.body) != DEPTH.size:
        raise BadMessage(f"a depth of {len(message.body)} bytes, it has {DEPTH.size}")
    return DEPTH.unpack(message.body)


def read_about_rank(message: Message, ranks: int) -> tuple[int, str]:
    """The rank and what is said of it. Raises BadMessage."""
    if len(message.body) < RANK.size:
        raise BadMessage(f"{message.kind.name} that names no rank")
    (rank,) = RANK.unpack_from(message.body)
    if rank >= ranks:
        raise BadMessage(f"{message.kind.name} of rank {rank} of {ranks}")
    return rank, message.body[RANK.size :].decode(errors="replace")

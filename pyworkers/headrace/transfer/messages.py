"""What the two ends of a transfer connection say to each other; `base.py` says when.

A message is `u32 little-endian length | msgpack [number, field, ...]`. After a `Data` come the bytes it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.errors import MalformedFrame
from headrace.schema import U16, U32, Schema
from headrace.transfer.base import TICKET_BYTES, Ending

# Of a context of a million tokens in blocks of 16 a `Pull` has 256 KiB.
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_BLOCKS: Final = (MAX_MESSAGE_BYTES - 1024) // 4  # of one pull
# Before the handshake a peer may be anybody: it gets no more of our memory than this.
MAX_HELLO_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Hello:
    """First message. `layout` is what `layout_text` says, `backends` are those the client can do, best first.

    The `ticket` of the pull to come shows that a router sent the client here.
    """

    version: U16
    layout: str
    backends: list[str]
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Pull:
    """Take the blocks at these places of the ticket's source; `places` is u32 little-endian. Numbers are not reused."""

    pull: U32
    ticket: bytes
    places: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """The client has all of it: does it count?"""

    pull: U32


@dataclass(frozen=True, slots=True)
class Abort:
    """The client wants no more of it."""

    pull: U32


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The client is let in, to move bytes by `backend`, whose `Mover` understands `about`."""

    version: U16
    backend: str
    about: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why a client is not let in: what differs, and both values."""

    field: str  # version, layout, backends, user, links
    ours: str
    yours: str


@dataclass(frozen=True, slots=True)
class Started:
    """The source's numbers of the wanted blocks, u32 little-endian; empty where the client has no use for them."""

    pull: U32
    blocks: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """Segments of one group, of the wanted blocks `start` to `stop`, may be read. No segment is named twice."""

    pull: U32
    group: U32
    start: U32
    stop: U32


@dataclass(frozen=True, slots=True)
class Data:
    """Those segments follow, region by region and in each block by block; `crc32` is of all of them."""

    pull: U32
    group: U32
    start: U32
    stop: U32
    crc32: U32


@dataclass(frozen=True, slots=True)
class Closed:
    """Answer to `Release` and `Abort`: the server does nothing for this pull any more. Nothing follows."""

    pull: U32
    intact: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The server ended the pull. Nothing follows."""

    pull: U32
    why: Ending
    message: str


FromClient: TypeAlias = Hello | Pull | Release | Abort | Alive
FromServer: TypeAlias = Welcome | Refuse | Started | Ready | Data | Closed | Ended | Alive


def _pull_rule(message: Pull) -> None:
    if len(message.ticket) != TICKET_BYTES:
        raise MalformedFrame(".ticket", f"{TICKET_BYTES} bytes", str(len(message.ticket)))
    if len(message.places) % 4:
        raise MalformedFrame(".places", "4 bytes each", str(len(message.places)))


def _extent_rule(message: Ready | Data) -> None:
    if message.start >= message.stop:
        raise MalformedFrame(".stop", f"more than {message.start}", str(message.stop))


SCHEMA: Final = Schema(
    {
        1: ("hello", Hello),
        2: ("pull", Pull),
        3: ("release", Release),
        4: ("abort", Abort),
        5: ("alive", Alive),
        32: ("welcome", Welcome),
        33: ("refuse", Refuse),
        34: ("started", Started),
        35: ("ready", Ready),
        36: ("data", Data),
        37: ("closed", Closed),
        38: ("ended", Ended),
    },
    MAX_MESSAGE_BYTES,
    {Pull: _pull_rule, Ready: _extent_rule, Data: _extent_rule},
)

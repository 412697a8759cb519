"""What the two ends of a transfer connection say to each other; `base.py` says when.

A message is `u32 little-endian length | msgpack [number, field, ...]`. After a `Data` come the bytes it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from headrace.errors import MalformedFrame
from headrace.kv_transfer.backends.base import ENDINGS, TICKET_BYTES
from headrace.kv_transfer.peers.members import MAX_KEYS, NONCE_BYTES, PROOF_BYTES
from headrace.wire.frames import TransferFailure
from headrace.wire.schema import U16, U32, Schema

# Of a context of a million tokens in blocks of 16 a `PullBlocks` has 256 KiB.
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_BLOCKS: Final = (MAX_MESSAGE_BYTES - 1024) // 4  # of one pull
# Before it has proved anything a peer may be anybody: it gets no more of our memory than this. A `KvProve` with a proof
# for each of `MAX_KEYS` has 613 bytes.
MAX_STRANGER_BYTES: Final = 1 << 10
MAX_HANDSHAKE_BYTES: Final = 64 << 10  # of what follows until the Welcome


@dataclass(frozen=True, slots=True)
class KvHello:
    """First message. The nonce is random."""

    version: U16
    nonce: bytes


@dataclass(frozen=True, slots=True)
class KvProve:
    """The client belongs here: proofs by all keys that it has (`members.py`), about the ticket of the pull to come.

    And the ticket is the client's: `pull_proof` over all of `proofs`, in their order.
    """

    ticket: bytes
    proofs: list[bytes]
    pull_proof: bytes


@dataclass(frozen=True, slots=True)
class KvOpen:
    """What the client is. `layout` is what `layout_text` says, `backends` are those it can do, best first."""

    layout: str
    backends: list[str]


@dataclass(frozen=True, slots=True)
class PullBlocks:
    """Take the blocks at these places of the ticket's source; `places` is u32 little-endian. Numbers are not reused.

    The ticket is the client's: `pull_proof` over what both ends share.
    """

    pull: U32
    ticket: bytes
    pull_proof: bytes
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
class Challenge:
    """Answer to `KvHello`: another random nonce."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class KvWelcome:
    """The client is let in, to move bytes by `backend`, whose `Mover` understands `about`; the source's own proof."""

    backend: str
    about: bytes
    proof: bytes


class KvRefuseReason(StrEnum):
    """What a client lacks, or what differs."""

    VERSION = "version"
    PROOF = "proof"
    TICKET = "ticket"
    PULL_KEY = "pull_key"
    LINKS = "links"
    LAYOUT = "layout"
    BACKENDS = "backends"


@dataclass(frozen=True, slots=True)
class KvRefuse:
    """Why a client is not let in; both values are for people.

    `why` says what became of the pull, where the ticket or its key is the reason, and only there.
    """

    reason: KvRefuseReason
    why: TransferFailure | None
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
    why: TransferFailure
    message: str


FromClient: TypeAlias = KvHello | KvProve | KvOpen | PullBlocks | Release | Abort | Alive
FromServer: TypeAlias = (
    Challenge | KvWelcome | KvRefuse | Started | Ready | Data | Closed | Ended | Alive
)


def _exactly(field: str, value: bytes, size: int) -> None:
    if len(value) != size:
        raise MalformedFrame(f".{field}", f"{size} bytes", str(len(value)))


def _nonce_rule(message: KvHello | Challenge) -> None:
    _exactly("nonce", message.nonce, NONCE_BYTES)


def _prove_rule(message: KvProve) -> None:
    _exactly("ticket", message.ticket, TICKET_BYTES)
    if len(message.proofs) > MAX_KEYS:
        raise MalformedFrame(".proofs", f"at most {MAX_KEYS}", str(len(message.proofs)))
    for place, proof in enumerate(message.proofs):
        _exactly(f"proofs[{place}]", proof, PROOF_BYTES)
    _exactly("pull_proof", message.pull_proof, PROOF_BYTES)


def _welcome_rule(message: KvWelcome) -> None:
    _exactly("proof", message.proof, PROOF_BYTES)


def _ending(why: TransferFailure) -> None:
    if why not in ENDINGS:
        raise MalformedFrame(".why", "what a source may say", str(why))


def _refuse_rule(message: KvRefuse) -> None:
    of_pull = message.reason in {KvRefuseReason.TICKET, KvRefuseReason.PULL_KEY}
    if of_pull is not (message.why is not None):
        expected = "a word for a ticket or its key, and nil otherwise"
        raise MalformedFrame(".why", expected, str(message.why))
    if message.why is not None:
        _ending(message.why)


def _ended_rule(message: Ended) -> None:
    _ending(message.why)


def _pull_rule(message: PullBlocks) -> None:
    _exactly("ticket", message.ticket, TICKET_BYTES)
    _exactly("pull_proof", message.pull_proof, PROOF_BYTES)
    if len(message.places) % 4:
        raise MalformedFrame(".places", "4 bytes each", str(len(message.places)))


def _extent_rule(message: Ready | Data) -> None:
    if message.start >= message.stop:
        raise MalformedFrame(".stop", f"more than {message.start}", str(message.stop))


SCHEMA: Final = Schema(
    {
        1: ("hello", KvHello),
        2: ("pull", PullBlocks),
        3: ("release", Release),
        4: ("abort", Abort),
        5: ("alive", Alive),
        6: ("prove", KvProve),
        7: ("open", KvOpen),
        32: ("welcome", KvWelcome),
        33: ("refuse", KvRefuse),
        34: ("started", Started),
        35: ("ready", Ready),
        36: ("data", Data),
        37: ("closed", Closed),
        38: ("ended", Ended),
        39: ("challenge", Challenge),
    },
    MAX_MESSAGE_BYTES,
    {
        KvHello: _nonce_rule,
        Challenge: _nonce_rule,
        KvProve: _prove_rule,
        KvWelcome: _welcome_rule,
        KvRefuse: _refuse_rule,
        Ended: _ended_rule,
        PullBlocks: _pull_rule,
        Ready: _extent_rule,
        Data: _extent_rule,
    },
)

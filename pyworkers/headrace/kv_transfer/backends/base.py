"""Moving KV blocks from one worker's pool into another's: what is said, by whom, and what everybody shares.

A decode worker (the client) pulls from a prefill worker (the server). One connection for each pair carries

    client                                     server
    Hello (version, nonce)               ->
                                         <-    Challenge (nonce)
    Prove (ticket, proofs, pull proof)   ->
    Open (layout, back-ends)             ->
                                         <-    Welcome (back-end, what it has to know, proof)
                                         <-    Refuse (both values)            in its place, or that of Challenge
    Pull (number, ticket, proof, places) ->
                                         <-    Started (the blocks' numbers over there)
                                         <-    Ready (group, from, to)     as the source computes them, or, where the
                                         <-    Data (.., checksum) + bytes     bytes take this way themselves, those
    Release or Abort                     ->
                                         <-    Closed (intact?)
                                         <-    Ended (why)                     at any time instead
    Alive                               <->    Alive                           every heartbeat

Until its proofs (`members.py`) and its ticket were right the client is a stranger: it hears our version and nothing
more of us, has two seconds, and takes no room from others (`room.py`). A connection then serves any number of pulls,
each with a ticket of its own and a proof that the client has the ticket's pull key. Whoever was let in by shared
memory, CUDA IPC or NIXL can read the whole pool, not only the blocks of its tickets, for as long as it keeps the
mapping.

The *back-end* moves the bytes: by copies out of shared memory (`shm.py`, `cuda_ipc.py`), by reads over RDMA or what
stands in for it (`nixl.py`), or inside this connection (`tcp.py`). Where the client reads by itself it may read blocks
that the server has just given to somebody else: only `Closed(intact=True)`, said after the last read, makes the bytes
count. A *segment* is what one block has in one layer group; it is moved once the source has computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, get_args

from headrace.errors import HeadraceError
from headrace.wire.frames import TransferBackend, TransferFailure

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool

VERSION: Final = 4
TICKET_BYTES: Final = 24  # random: names what may be pulled, to whoever has its pull key, too

Ending: TypeAlias = Literal[
    TransferFailure.REVOKED,
    TransferFailure.EXPIRED,
    TransferFailure.REFUSED,
    TransferFailure.NO_ROOM,
]
"""What a server may say."""
ENDINGS: Final[frozenset[TransferFailure]] = frozenset(get_args(Ending))


@dataclass(frozen=True, slots=True)
class BoundTicket:
    """What a pull takes: the source's ticket, and the key that the router gave to both ends of this pull alone."""

    ticket: bytes
    pull_key: bytes = field(repr=False)  # in no log


class TransferError(HeadraceError):
    """A pull failed, and nothing of it counts. Nothing writes to the pool any more."""

    def __init__(
        self, kind: TransferFailure, message: str, backend: TransferBackend | None = None
    ) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
        self.backend = backend  # None if it did not come to one

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class LinkBroken(HeadraceError):
    """The connection between client and server is of no use any more. Stays inside this package."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """One pull that counts."""

    backend: TransferBackend
    blocks: int
    bytes: int
    ms: float  # moving bytes and asking for them, without waiting for the source to compute
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one end. None of them was tuned."""

    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3  # nothing came, or nothing was taken, for so many: the peer is lost
    dial_s: float = 2.0  # for each address
    handshake_s: float = 5.0  # that a client gives a source
    stranger_s: float = 2.0  # that a source gives a client, from accepting it to the Welcome
    idle_s: float = 30.0  # the client hangs up when nothing was pulled for so long
    max_links: int = 256  # of each listener, of clients that were let in
    max_pulls: int = 256  # of one link, at a time


class KvSource(Protocol):
    """Blocks that may be pulled. Attributes are written on any thread and read on the event loop."""

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers in the pool, by place. They do not change."""
        ...

    @property
    def revoked(self) -> bool:
        """True before any of the blocks is written to or given away."""
        ...

    def ready(self, place: int, group: int) -> bool:
        """Whether that segment has been computed. Once true, always true."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """Segments of one group, of the wanted blocks `start` to `stop`."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Move:
    """Segments of one group that can be copied now: numbers in the source's pool, numbers in ours."""

    group: int
    theirs: Sequence[int]
    ours: Sequence[int]


class StopWriting:
    """Set on the event loop, read by whatever writes to the pool: not one more segment."""

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False


class Exporter(Protocol):
    """A back-end at the source: lets clients get at the pool."""

    name: str
    in_band: bool  # the bytes go through the connection itself

    def describe(self) -> tuple[bytes, list[int]]:
        """What a client's `Mover` has to know, and file descriptors for it (they stay ours)."""
        ...

    def close(self) -> None: ...


class Mover(Protocol):
    """A back-end at the client: copies segments out of one source's pool."""

    num_blocks: int  # of that pool
    broken: str | None  # why it can move nothing more

    async def move(self, moves: list[Move], stop: StopWriting) -> None:
        """Copy them all, or fewer if asked to stop. Raises LinkBroken.

        However it ends, also when it is cancelled: nothing writes to the pool any more.
        """
        ...

    def close(self) -> None:
        """Let go of the source's pool, after the move in flight."""
        ...


def layout_text(layout: str, pool: KvPool) -> str:
    """What two pools must agree on: the model's own text, and how many bytes lie where in a block."""
    runs: list[tuple[str, int]] = []
    for group in pool.groups:
        text = "+".join(str(region.nbytes) for region in group)
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    shape = ",".join(f"{times}x({text})" for text, times in runs)
    return f"{layout} groups={shape}"

"""The client's end of one connection: many pulls at a time from one source."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace.kv_transfer.backends.base import (
    BoundTicket,
    Limits,
    LinkBroken,
    Move,
    Mover,
    Pulled,
    StopWriting,
    TransferError,
)
from headrace.kv_transfer.backends.tcp import Receiver
from headrace.kv_transfer.peers.members import pull_proof
from headrace.kv_transfer.peers.messages import (
    MAX_BLOCKS,
    Abort,
    Alive,
    Closed,
    Data,
    Ended,
    FromClient,
    PullBlocks,
    Ready,
    Release,
    Started,
)
from headrace.kv_transfer.peers.stream import Stream
from headrace.kv_transfer.peers.watch import watch
from headrace.wire.frames import TransferBackend, TransferFailure

log = logging.getLogger(__name__)

MOVE_BYTES: Final = 32 << 20  # given to a mover at a time, so that pulls take turns. A guess


@dataclass(slots=True, eq=False)
class Pulling:
    """One pull at the client. `cursors` and `ready` have an entry for each group."""

    number: int
    targets: Sequence[int]  # our blocks
    cursors: list[int]  # wanted blocks that were announced
    asked_s: float  # when
    stop: StopWriting = field(default_factory=StopWriting)
    sources: Sequence[int] | None = None  # the source's blocks, once started
    ready: deque[Move] = field(default_factory=deque[Move])  # announced, not taken up yet
    missing: int = 0  # segments that are neither here nor in `ready`
    closed: bool | None = None  # the answer to Release: whether it counts
    error: TransferError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    moving_s: float = 0.0  # on the way to the source and back, and of bytes

    def fail(self, error: TransferError) -> None:
        if self.error is None:
            self.error = error
        self.stop.asked = True
        self.changed.set()

    async def change(self) -> None:
        """Wait until something came. Raises what ended the pull."""
        await self.changed.wait()
        self.changed.clear()
        if self.error is not None:
            raise self.error

    def announce(self, message: Ready | Data) -> None:
        """They may be read, or are about to come. Raises LinkBroken for segments that cannot be."""
        group, start, stop = message.group, message.start, message.stop
        if (
            self.sources is None
            or group >= len(self.cursors)
            or start != self.cursors[group]
            or stop > len(self.targets)
        ):
            raise LinkBroken(f"blocks {start} to {stop} of group {group} have no place")
        self.cursors[group] = stop


class ClientLink:
    """A connection whose handshake is done. `run` it; it serves any number of pulls until it breaks or is closed."""

    def __init__(
        self,
        stream: Stream,
        backend: TransferBackend,
        moving: Mover | Receiver,
        *,
        shared: bytes,
        segment_bytes: Sequence[int],
        limits: Limits,
    ) -> None:
        """`shared` is what each pull's proof is about (`Members.shared`)."""
        self.backend = backend
        self._stream = stream
        self._moving = moving
        self._shared = shared
        self._segment_bytes = segment_bytes
        self._limits = limits
        self._pulls: dict[int, Pulling] = {}
        self._next_number = 0
        self._unsent: deque[FromClient] = deque()
        self._wake = asyncio.Event()
        self._broken: str | None = None
        self.idle_since_s: float | None = asyncio.get_running_loop().time()

    @property
    def usable(self) -> bool:
        return self._broken is None

    async def run(self) -> None:
        """Until the source is gone, or `hang_up`. Whoever pulls then gets TransferError lost."""
        try:
            await watch(self._stream, self._limits, self._beat, self._receive(), self._send())
        except LinkBroken as error:
            self._broken = str(error)
        finally:
            self._end(self._broken or "the connection was closed", TransferFailure.LOST)
            if not isinstance(self._moving, Receiver):
                self._moving.close()

    def hang_up(self, why: str, kind: TransferFailure = TransferFailure.LOST) -> None:
        """End the connection and all that pulls over it."""
        self._end(why, kind)
        self._stream.close(why)

    def _end(self, why: str, kind: TransferFailure) -> None:
        self._broken = self._broken or why
        for pulling in self._pulls.values():
            pulling.fail(TransferError(kind, why, self.backend))

    # --- one pull ---

    async def pull(self, ticket: BoundTicket, wanted: Sequence[tuple[int, int]]) -> Pulled:
        """Pull `wanted`, (place, our block) each. Raises TransferError.

        However it ends, also when it is cancelled: nothing writes to the pool any more.
        """
        began_s = time.perf_counter()
        ordered = sorted(wanted)
        pulling = self._open(ticket, ordered)
        try:
            await pulling.change()  # started
            while pulling.missing or pulling.ready:
                await self._advance(pulling)
            released_s = time.perf_counter()
            self._say(Release(pulling.number))
            while pulling.closed is None:
                await pulling.change()
            if not pulling.closed:
                raise TransferError(
                    TransferFailure.REVOKED, "the source took its blocks back", self.backend
                )
        except BaseException:
            pulling.stop.asked = True
            if self.usable and pulling.error is None and pulling.closed is None:
                self._say(Abort(pulling.number))
            raise
        finally:
            self._pulls.pop(pulling.number, None)
            if not isinstance(self._moving, Receiver) and self._moving.broken is not None:
                self.hang_up(self._moving.broken)
            if not self._pulls:
                self.idle_since_s = asyncio.get_running_loop().time()
        ended_s = time.perf_counter()
        pulling.moving_s += ended_s - released_s
        return Pulled(
            backend=self.backend,
            blocks=len(ordered),
            bytes=len(ordered) * sum(self._segment_bytes),
            ms=pulling.moving_s * 1e3,
            total_ms=(ended_s - began_s) * 1e3,
        )

    def _open(self, ticket: BoundTicket, ordered: list[tuple[int, int]]) -> Pulling:
        if self._broken is not None:
            raise TransferError(TransferFailure.LOST, self._broken, self.backend)
        if len(ordered) > MAX_BLOCKS:
            raise TransferError(
                TransferFailure.REFUSED, f"{len(ordered)} blocks at once", self.backend
            )
        groups = len(self._segment_bytes)
        number = self._next_number
        self._next_number += 1
        pulling = Pulling(
            number,
            targets=[block for _, block in ordered],
            cursors=[0] * groups,
            asked_s=time.perf_counter(),
            missing=groups * len(ordered),
        )
        self._pulls[number] = pulling
        self.idle_since_s = None
        proof = pull_proof(ticket.pull_key, self._shared, ticket.ticket)
        places = array("I", [place for place, _ in ordered]).tobytes()
        self._say(PullBlocks(number, ticket.ticket, proof, places))
        return pulling

    async def _advance(self, pulling: Pulling) -> None:
        """Move what is ready, or wait for more."""
        if pulling.error is not None:
            raise pulling.error
        if isinstance(self._moving, Receiver) or not pulling.ready:
            await pulling.change()
            return
        moves, size = [], 0
        while pulling.ready and size < MOVE_BYTES:
            move = pulling.ready.popleft()
            moves.append(move)
            size += len(move.ours) * self._segment_bytes[move.group]
        began_s = time.perf_counter()
        try:
            await self._moving.move(moves, pulling.stop)
        except LinkBroken as error:
            raise TransferError(TransferFailure.LOST, str(error), self.backend) from error
        pulling.moving_s += time.perf_counter() - began_s
        if pulling.error is not None:
            raise pulling.error

    # --- the connection ---

    def _beat(self) -> None:
        idle_s = asyncio.get_running_loop().time() - (self.idle_since_s or math.inf)
        if idle_s > self._limits.idle_s:
            # said before anybody else runs: a pull that begins now needs another connection
            self._broken = "nothing was pulled for a while"
            raise LinkBroken(self._broken)
        self._say(Alive())

    def _say(self, message: FromClient) -> None:
        # Bounded: a few for each pull, and a heartbeat while the peer takes them.
        self._unsent.append(message)
        self._wake.set()

    async def _send(self) -> None:
        while True:
            self._wake.clear()
            said = list(self._unsent)
            self._unsent.clear()
            if said:
                await self._stream.send(said)
            else:
                await self._wake.wait()

    async def _receive(self) -> None:
        while True:
            match await self._stream.receive():
                case Alive():
                    pass
                case Started(number, blocks):
                    self._started(number, blocks)
                case Ready() as ready:
                    self._ready(ready)
                case Data() as data:
                    await self._data(data)
                case Closed(number, intact):
                    if (pulling := self._pulls.get(number)) is not None:
                        pulling.closed = intact
                        pulling.changed.set()
                case Ended(number, why, message):
                    if (pulling := self._pulls.get(number)) is not None:
                        pulling.fail(TransferError(why, message, self.backend))
                case other:
                    raise LinkBroken(f"a {type(other).__name__} where it has no place")

    def _started(self, number: int, blocks: bytes) -> None:
        pulling = self._pulls.get(number)
        if pulling is None:
            return  # given up meanwhile
        if len(blocks) != 4 * len(pulling.targets) or pulling.sources is not None:
            raise LinkBroken(
                f"{len(blocks)} bytes of block numbers for {len(pulling.targets)} blocks"
            )
        pulling.sources = array("I", blocks)
        pulling.moving_s += time.perf_counter() - pulling.asked_s
        moving = self._moving
        highest = max(pulling.sources, default=-1)
        if not isinstance(moving, Receiver) and highest >= moving.num_blocks:
            raise LinkBroken(f"block {highest} of a pool of {moving.num_blocks}")
        pulling.changed.set()

    def _ready(self, message: Ready) -> None:
        pulling = self._pulls.get(message.pull)
        if isinstance(self._moving, Receiver):
            raise LinkBroken("a Ready on a connection whose bytes come in band")
        if pulling is None:
            return
        pulling.announce(message)
        assert pulling.sources is not None  # announce saw to it
        span = slice(message.start, message.stop)
        pulling.ready.append(Move(message.group, pulling.sources[span], pulling.targets[span]))
        pulling.missing -= message.stop - message.start
        pulling.changed.set()

    async def _data(self, data: Data) -> None:
        if not isinstance(self._moving, Receiver) or data.group >= len(self._segment_bytes):
            raise LinkBroken("a Data that has no place")
        began_s = time.perf_counter()
        pulling = self._pulls.get(data.pull)
        if pulling is None:
            await self._moving.receive(data, None)
            return
        pulling.announce(data)
        try:
            await self._moving.receive(data, pulling)
        except TransferError as error:
            self._say(Abort(data.pull))
            error.backend = self.backend
            pulling.fail(error)
        else:  # only now: what is still on its way must not be released
            pulling.missing -= data.stop - data.start
        pulling.moving_s += time.perf_counter() - began_s
        pulling.changed.set()
        await asyncio.sleep(0)  # a quick source does not keep others from their turn

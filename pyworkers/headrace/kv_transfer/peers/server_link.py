"""One client's connection, at the source: its messages in, readiness and bytes out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from headrace import _core
from headrace.kv_transfer.backends.base import (
    VERSION,
    Ending,
    Exporter,
    Limits,
    LinkBroken,
)
from headrace.kv_transfer.backends.memory import Memory
from headrace.kv_transfer.peers.members import NONCE_BYTES, Members, Transcript
from headrace.kv_transfer.peers.messages import (
    MAX_HANDSHAKE_BYTES,
    MAX_STRANGER_BYTES,
    Abort,
    Alive,
    Challenge,
    Closed,
    Data,
    Ended,
    FromServer,
    KvHello,
    KvOpen,
    KvProve,
    KvRefuse,
    KvRefuseReason,
    KvWelcome,
    PullBlocks,
    Ready,
    Release,
    Started,
)
from headrace.kv_transfer.peers.offers import Denied, Offers, Serving, ShownTicket, WrongPullKey
from headrace.kv_transfer.peers.stream import Stream
from headrace.kv_transfer.peers.watch import watch
from headrace.wire.frames import TransferFailure

log = logging.getLogger(__name__)

# Of segments in one `Data`, unless one segment has more. 1 to 8 MiB are as good.
FRAME_BYTES: Final = 2 << 20
UNSENT_MESSAGES: Final = 4096  # a client that asks and never listens is dropped
UNBOUNDED: Final = sys.maxsize  # blocks in one `Ready`: it costs no memory
# Refusals that anybody can bring about, as often as he likes: the server counts them and says so now and then.
STRANGE: Final = frozenset({KvRefuseReason.VERSION, KvRefuseReason.PROOF})

Handshake = TypeVar("Handshake", KvHello, KvProve, KvOpen)


class ServerLink:
    """Serves one client until it hangs up or breaks a rule. Leaves no state when it ends."""

    def __init__(
        self,
        stream: Stream,
        *,
        layout: str,
        exporters: list[Exporter],
        memory: Callable[[], Memory],
        segment_bytes: list[int],
        offers: Offers,
        limits: Limits,
        members: Members,
        admit: Callable[[ServerLink], bool],
        turned_away: Callable[[str], None],
    ) -> None:
        """`admit` is asked whether there is room once the client has shown who it is; `turned_away` hears why not, and
        of pulls whose proof is not by their ticket's key."""
        self._stream = stream
        self._members = members
        self._admit = admit
        self._turned_away = turned_away
        self._layout = layout
        self._exporters = exporters
        self._open_memory = memory
        self._segment_bytes = segment_bytes
        self._offers = offers
        self._limits = limits
        self._pulls: dict[int, Serving] = {}
        self._turns: deque[Serving] = deque()  # those with something left to hand over
        self._last_number = -1
        self._shared = b""  # what the client's later proofs are about; set by the handshake
        self._unsent: deque[FromServer] = deque()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something became ready, or was withdrawn."""
        self._wake.set()

    def hang_up(self, why: str) -> None:
        """End the connection and all that is pulled over it."""
        self._stream.close(why)

    async def serve(self) -> None:
        """Run until the client is gone."""
        try:
            async with asyncio.timeout(self._limits.stranger_s):
                exporter = await self._shake_hands()
            await watch(
                self._stream, self._limits, self._alive, self._receive(), self._send(exporter)
            )
        except TimeoutError:
            self._turned_away("late")
        except LinkBroken as error:
            log.debug("transfer: a client is gone: %s", error)
        finally:
            self._stream.close("the server closed the connection")
            for serving in self._pulls.values():
                self._offers.fail(serving)
            self._pulls.clear()

    async def _shake_hands(self) -> Exporter:
        """Whoever has shown nothing yet hears nothing but our version."""
        hello = await self._next(KvHello, MAX_STRANGER_BYTES)
        if hello.version != VERSION:
            await self._refuse(KvRefuseReason.VERSION, str(VERSION), str(hello.version))
        nonce = secrets.token_bytes(NONCE_BYTES)
        await self._stream.send([Challenge(nonce)])
        prove = await self._next(KvProve, MAX_STRANGER_BYTES)
        transcript = Transcript(hello.nonce, nonce, prove.ticket)
        met = self._members.answer(transcript, prove.proofs)
        if met is None:
            await self._refuse(KvRefuseReason.PROOF, "one of a worker of this router", "none of it")
        # before the Welcome: its descriptor gives all of the pool
        try:
            self._offers.find(ShownTicket(prove.ticket, prove.pull_proof, b"".join(prove.proofs)))
        except WrongPullKey as denied:
            reason = KvRefuseReason.PULL_KEY
            await self._refuse(reason, "that of the ticket", "another", denied.why)
        except Denied as denied:
            await self._refuse(KvRefuseReason.TICKET, str(denied.why), denied.message, denied.why)
        if not self._admit(self):
            await self._refuse(
                KvRefuseReason.LINKS, f"{self._limits.max_links} at most", "one more"
            )
        self._shared = met.shared
        return await self._welcome(await self._next(KvOpen, MAX_HANDSHAKE_BYTES), met.proof)

    async def _welcome(self, opening: KvOpen, proof: bytes) -> Exporter:
        """Settle on a back-end, and hand out what it takes to use it."""
        if opening.layout != self._layout:
            await self._refuse(KvRefuseReason.LAYOUT, self._layout, opening.layout)
        for name in opening.backends:
            for exporter in self._exporters:
                if exporter.name == name:
                    about, fds = exporter.describe()
                    welcome = KvWelcome(name, about, proof)
                    if fds:
                        await self._stream.send_with_fds(welcome, fds)
                    else:
                        await self._stream.send([welcome])
                    return exporter
        ours = ", ".join(exporter.name for exporter in self._exporters)
        return await self._refuse(KvRefuseReason.BACKENDS, ours, ", ".join(opening.backends))

    async def _next(self, kind: type[Handshake], limit: int) -> Handshake:
        message = await self._stream.receive(limit)
        if not isinstance(message, kind):
            name = type(message).__name__
            raise LinkBroken(f"a {name} where a {kind.__name__} has its place")
        return message

    async def _refuse(
        self, reason: KvRefuseReason, ours: str, yours: str, why: Ending | None = None
    ) -> NoReturn:
        self._turned_away(reason)
        level = logging.DEBUG if reason in STRANGE else logging.WARNING
        text = "transfer: a client is refused: its %s is %.200r, here it is %.200r"
        log.log(level, text, reason, yours, ours)
        await self._stream.send([KvRefuse(reason, why, ours, yours)])
        raise LinkBroken("refused")

    def _alive(self) -> None:
        self._say(Alive())

    def _say(self, message: FromServer) -> None:
        if len(self._unsent) >= UNSENT_MESSAGES:
            raise LinkBroken("the client asks and does not listen")
        self._unsent.append(message)
        self._wake.set()

    # --- in ---

    async def _receive(self) -> None:
        while True:
            match await self._stream.receive():
                case Alive():
                    pass
                case PullBlocks() as pull:
                    self._begin(pull)
                case Release(number):
                    self._release(number)
                case Abort(number):
                    self._abort(number)
                case other:
                    raise LinkBroken(f"a {type(other).__name__} where it has no place")

    def _begin(self, pull: PullBlocks) -> None:
        if pull.pull <= self._last_number:
            raise LinkBroken(f"pull {pull.pull} after pull {self._last_number}")
        self._last_number = pull.pull
        try:
            if len(self._pulls) >= self._limits.max_pulls:
                limit = self._limits.max_pulls
                raise Denied(TransferFailure.NO_ROOM, f"{limit} pulls of this client are in flight")
            shown = ShownTicket(pull.ticket, pull.pull_proof, self._shared)
            serving = self._offers.begin(pull.pull, shown, pull.places)
        except Denied as denied:
            if isinstance(denied, WrongPullKey):
                self._turned_away(KvRefuseReason.PULL_KEY)
            self._say(Ended(pull.pull, denied.why, denied.message))
            return
        self._pulls[pull.pull] = serving
        self._turns.append(serving)
        self._say(Started(pull.pull, array("I", serving.blocks).tobytes()))

    def _release(self, number: int) -> None:
        serving = self._pulls.pop(number, None)
        if serving is not None:  # otherwise it has ended, and the client is about to hear that
            self._say(Closed(number, self._offers.finish(serving)))

    def _abort(self, number: int) -> None:
        serving = self._pulls.pop(number, None)
        if serving is not None:
            intact = serving.offer.gone is None
            self._offers.fail(serving)
            self._say(Closed(number, intact))

    # --- out ---

    async def _send(self, exporter: Exporter) -> None:
        """Answers first, then what became ready, one pull after the other."""
        memory = self._open_memory() if exporter.in_band else None
        most = [UNBOUNDED for _ in self._segment_bytes]
        if exporter.in_band:
            most = [max(1, FRAME_BYTES // size) for size in self._segment_bytes]
        while True:
            self._wake.clear()
            self._end_withdrawn()
            said = list(self._unsent)
            self._unsent.clear()
            if memory is None:
                said += self._all_ready(most)
            if said:
                await self._stream.send(said)
            if memory is not None and await self._send_segments(memory, most):
                await asyncio.sleep(0)  # a quick socket does not keep others from their turn
                continue
            if not said:
                await self._wake.wait()

    def _end_withdrawn(self) -> None:
        for number, serving in list(self._pulls.items()):
            why = serving.offer.gone
            if why is not None:
                del self._pulls[number]
                self._offers.fail(serving)
                self._say(Ended(number, why, "the source took its blocks back"))

    def _all_ready(self, most: list[int]) -> list[FromServer]:
        said: list[FromServer] = []
        for serving in self._pulls.values():
            while (extent := serving.next_extent(most)) is not None:
                said.append(Ready(serving.number, extent.group, extent.start, extent.stop))
        return said

    async def _send_segments(self, memory: Memory, most: list[int]) -> bool:
        """One frame of the next pull that has something ready. False if none has."""
        for _ in range(len(self._turns)):
            serving = self._turns.popleft()
            if serving.number not in self._pulls:
                continue
            extent = serving.next_extent(most)
            if not serving.complete:
                self._turns.append(serving)
            if extent is None:
                continue
            blocks = [
                serving.offer.source.blocks[place]
                for place in serving.places[extent.start : extent.stop]
            ]
            parts = memory.outgoing(extent.group, blocks)
            crc = _core.crc32(parts)
            data = Data(serving.number, extent.group, extent.start, extent.stop, crc)
            await self._stream.send([data], parts)
            return True
        return False

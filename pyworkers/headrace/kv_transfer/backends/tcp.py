"""TCP between hosts: the bytes come in band, from the source's pool to ours with no copy by us in between.

A `Data` names its segments and their checksum; the bytes follow. One task reads the connection and waits nowhere
between deciding that a pull goes on and writing for it: a pull that is given up is not written to any more, and what is
still in flight for it is read into scratch memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from headrace import _core
from headrace.kv_transfer.backends.base import StopWriting, TransferError
from headrace.kv_transfer.backends.memory import Memory
from headrace.kv_transfer.backends.spans import Spans
from headrace.kv_transfer.peers.messages import Data
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import TransferFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = "tcp"
# A reader that is quicker than the network would be woken for every packet. A guess.
WAKE_BYTES: Final = 256 << 10
SCRATCH_BYTES: Final = 256 << 10


class TcpExporter:
    """Nothing to tell a client: it is sent the bytes."""

    name = NAME
    in_band = True

    def describe(self) -> tuple[bytes, list[int]]:
        return b"", []

    def close(self) -> None:
        """Nothing is held."""


class Wanting(Protocol):
    """Who waits for the bytes of a `Data`."""

    stop: StopWriting

    @property
    def targets(self) -> Sequence[int]:
        """Our blocks, in the order in which they were asked for."""
        ...


class Receiver:
    """Reads what follows a `Data`."""

    def __init__(self, stream: Stream, memory: Memory, segment_bytes: Sequence[int]) -> None:
        self._stream = stream
        self._memory = memory
        self._segment_bytes = segment_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    async def receive(self, data: Data, wanting: Wanting | None) -> None:
        """Its segments into the pool, or nowhere if nobody waits for them any more.

        Raises LinkBroken, and TransferError if the checksum is wrong; then the stream can still go on.
        """
        rest = (data.stop - data.start) * self._segment_bytes[data.group]
        if wanting is not None:
            blocks = wanting.targets[data.start : data.stop]
            spans = Spans(self._memory.incoming(data.group, blocks))
            crc = 0
            while rest and not wanting.stop.asked:
                got = self._stream.take_into(spans.rest())
                rest -= got
                if got:  # sum it while the cache has it
                    crc = _core.crc32(spans.between(spans.at, spans.at + got), crc)
                    spans.at += got
                else:
                    await self._stream.readable(min(rest, WAKE_BYTES))
            if not wanting.stop.asked:
                if crc != data.crc32:
                    text = f"group {data.group} of blocks {data.start} to {data.stop}"
                    raise TransferError(
                        TransferFailure.CHECKSUM, f"the bytes of {text} are not those sent"
                    )
                self._memory.landed(data.group, blocks)
        while rest:
            got = self._stream.take_into([self._scratch[:rest]])
            rest -= got
            if not got:
                await self._stream.readable()

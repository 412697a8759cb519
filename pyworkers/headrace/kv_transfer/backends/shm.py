"""Shared memory on one host: the client maps the source's pool for reading and copies out of it.

The pool lies in an anonymous file (memfd); whoever is let in gets a descriptor of it over the Unix socket, opened for
reading only. The mapping outlives the source's process, so a source that is killed cannot crash its readers.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from headrace import _core
from headrace.errors import WireError
from headrace.kv_transfer.backends.base import LinkBroken, Move, StopWriting
from headrace.kv_transfer.backends.memory import check_sizes, segment_bytes
from headrace.kv_transfer.peers.messages import MAX_HANDSHAKE_BYTES
from headrace.wire.schema import U32, U64, Schema

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool

NAME: Final = "shm"
PIECE_BYTES: Final = 1 << 20  # between two looks at whether to go on: a tenth of a millisecond
INLINE_BYTES: Final = 128 << 10  # so few are copied sooner than a thread is woken


@dataclass(frozen=True, slots=True)
class ShmPart:
    """A region of the source's pool, inside its file."""

    stride: U64
    offset: U64
    nbytes: U64


@dataclass(frozen=True, slots=True)
class ShmPool:
    """The source's pool: its blocks, its regions by layer group."""

    num_blocks: U32
    groups: list[list[ShmPart]]


SCHEMA: Final = Schema({1: ("pool", ShmPool)}, MAX_HANDSHAKE_BYTES)


class ShmExporter:
    """Shows a pool that lies in a memfd."""

    name = NAME
    in_band = False

    def __init__(self, pool: KvPool) -> None:
        """Raises ValueError if the pool does not lie in one."""
        if pool.memfd is None:
            raise ValueError("only a pool in a memfd can be shared")
        groups = [[ShmPart(r.stride, r.offset, r.nbytes) for r in group] for group in pool.groups]
        self._about = SCHEMA.encode(ShmPool(pool.num_blocks, groups))
        self._fd = os.open(f"/proc/self/fd/{pool.memfd}", os.O_RDONLY | os.O_CLOEXEC)

    def describe(self) -> tuple[bytes, list[int]]:
        return self._about, [self._fd]

    def close(self) -> None:
        os.close(self._fd)


class ShmMover:
    """Copies segments on `thread`, which other movers may share."""

    def __init__(
        self, pool: KvPool, about: bytes, fds: list[int], thread: ThreadPoolExecutor
    ) -> None:
        """Raises LinkBroken if what the source says of its pool cannot be."""
        self._thread = thread
        if len(fds) != 1:
            raise LinkBroken(f"{len(fds)} files instead of one")
        try:
            theirs: ShmPool = SCHEMA.decode(about)
        except WireError as error:
            raise LinkBroken(f"its pool: {error}") from error
        check_sizes([[part.nbytes for part in group] for group in theirs.groups], pool)
        size = os.fstat(fds[0]).st_size
        try:
            self._memory = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise LinkBroken(f"its memory cannot be mapped: {error}") from error
        self._theirs = [[_checked(p, theirs.num_blocks, size) for p in g] for g in theirs.groups]
        self.num_blocks = theirs.num_blocks
        self.broken: str | None = None
        self._ours = pool.groups
        self._segment_bytes = segment_bytes(pool)

    async def move(self, moves: list[Move], stop: StopWriting) -> None:
        if sum(len(move.ours) * self._segment_bytes[move.group] for move in moves) <= INLINE_BYTES:
            self._copy(moves, stop)
            return
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._thread, self._copy, moves, stop)
        try:
            await asyncio.shield(copying)
        finally:
            if not copying.done():  # cancelled: it stops after the piece that it copies
                stop.asked = True
                await settled(copying)

    def _copy(self, moves: list[Move], stop: StopWriting) -> None:
        for move in moves:
            theirs, ours = np.array(move.theirs, np.uint64), np.array(move.ours, np.uint64)
            for part, region in zip(self._theirs[move.group], self._ours[move.group], strict=True):
                most = max(1, PIECE_BYTES // part.nbytes)
                reads = np.uint64(part.offset) + theirs * np.uint64(part.stride)
                writes = np.uint64(region.offset) + ours * np.uint64(region.stride)
                memory = cast(memoryview, region.memory)
                for at in range(0, len(reads), most):
                    if stop.asked:
                        return
                    piece = slice(at, at + most)
                    _core.copy_segments(
                        self._memory, reads[piece], memory, writes[piece], part.nbytes
                    )

    def close(self) -> None:
        """The mapping goes with the last array on it."""


def _checked(part: ShmPart, num_blocks: int, size: int) -> ShmPart:
    if num_blocks == 0 or part.offset + (num_blocks - 1) * part.stride + part.nbytes > size:
        raise LinkBroken("its pool is larger than its memory")
    return part


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, however often this is cancelled meanwhile; then pass the cancellation on."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled

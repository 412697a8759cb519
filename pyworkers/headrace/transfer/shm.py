"""Shared memory on one host: the client maps the source's pool for reading and copies out of it.

The pool lies in an anonymous file (memfd); whoever is let in gets a descriptor of it over the Unix socket, opened for
reading only. The mapping outlives the source's process, so a source that is killed cannot crash its readers.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import WireError
from headrace.schema import U32, U64, Schema
from headrace.transfer.base import LinkBroken, Move, Stop
from headrace.transfer.memory import runs
from headrace.transfer.messages import MAX_HELLO_BYTES

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool, KvRegion

NAME: Final = "shm"
PIECE_BYTES: Final = 1 << 20  # between two looks at whether to go on: a tenth of a millisecond


@dataclass(frozen=True, slots=True)
class Part:
    """A region of the source's pool, inside its file."""

    stride: U64
    offset: U64
    nbytes: U64


@dataclass(frozen=True, slots=True)
class Pool:
    """The source's pool: its blocks, its regions by layer group."""

    num_blocks: U32
    groups: list[list[Part]]


SCHEMA: Final = Schema({1: ("pool", Pool)}, MAX_HELLO_BYTES)


class ShmExporter:
    """Shows a pool that lies in a memfd."""

    name = NAME
    in_band = False

    def __init__(self, pool: KvPool) -> None:
        """Raises ValueError if the pool does not lie in one."""
        if pool.memfd is None:
            raise ValueError("only a pool in a memfd can be shared")
        groups = [[Part(r.stride, r.offset, r.nbytes) for r in group] for group in pool.groups]
        self._about = SCHEMA.encode(Pool(pool.num_blocks, groups))
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
            theirs: Pool = SCHEMA.decode(about)
        except WireError as error:
            raise LinkBroken(f"its pool: {error}") from error
        size = os.fstat(fds[0]).st_size
        self._mapped = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
        memory = np.frombuffer(self._mapped, np.uint8)
        self.num_blocks = theirs.num_blocks
        self.broken: str | None = None
        self._theirs = [[_rows(memory, p, theirs.num_blocks) for p in g] for g in theirs.groups]
        self._ours = [[_region(r, pool.num_blocks) for r in group] for group in pool.groups]

    async def move(self, moves: list[Move], stop: Stop) -> None:
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._thread, self._copy, moves, stop)
        try:
            await asyncio.shield(copying)
        finally:
            if not copying.done():  # cancelled: it stops after the piece under way
                stop.asked = True
                await settled(copying)

    def _copy(self, moves: list[Move], stop: Stop) -> None:
        for move in moves:
            for theirs, ours in zip(self._theirs[move.group], self._ours[move.group], strict=True):
                _copy_blocks(theirs, ours, move.theirs, move.ours, stop)

    def close(self) -> None:
        """The mapping goes with the last array on it."""


def _copy_blocks(
    theirs: NDArray[np.uint8],
    ours: NDArray[np.uint8],
    sources: Sequence[int],
    targets: Sequence[int],
    stop: Stop,
) -> None:
    most = max(1, PIECE_BYTES // theirs.shape[1])
    for first, count in runs(sources, targets):
        for at in range(first, first + count, most):
            if stop.asked:
                return
            blocks = min(most, first + count - at)
            source, target = sources[at], targets[at]
            # releases the GIL
            np.copyto(ours[target : target + blocks], theirs[source : source + blocks])


def _rows(memory: NDArray[np.uint8], part: Part, num_blocks: int) -> NDArray[np.uint8]:
    """A region as [num_blocks, nbytes], after a look at whether it lies inside `memory`."""
    if num_blocks == 0 or part.offset + (num_blocks - 1) * part.stride + part.nbytes > len(memory):
        raise LinkBroken("its pool is larger than its memory")
    return np.lib.stride_tricks.as_strided(
        memory[part.offset :], (num_blocks, part.nbytes), (part.stride, 1)
    )


def _region(region: KvRegion, num_blocks: int) -> NDArray[np.uint8]:
    memory = np.frombuffer(cast(memoryview, region.memory), np.uint8)
    return _rows(memory, Part(region.stride, region.offset, region.nbytes), num_blocks)


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

"""CUDA IPC on one host: the client maps the source's device memory and copies from device to device.

Handles are those that torch shares tensors with between processes. A device is known by its UUID, because two processes
may see the devices of a machine under other numbers; one that the client does not see leaves it the network.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from headrace.errors import WireError
from headrace.kv_transfer.backends.base import LinkBroken, Move, StopWriting
from headrace.kv_transfer.backends.memory import blocks_of, check_sizes, runs
from headrace.kv_transfer.backends.shm import settled
from headrace.kv_transfer.peers.messages import MAX_HANDSHAKE_BYTES
from headrace.wire.schema import U32, U64, Schema

if TYPE_CHECKING:
    import torch

    from headrace_kernels.ops import KvPool

NAME: Final = "cuda-ipc"


@dataclass(frozen=True, slots=True)
class Handle:
    """What `UntypedStorage._share_cuda_` gives, but for the device's number."""

    handle: bytes
    size: U64
    offset: U64
    ref_counter: bytes
    ref_counter_offset: U64
    event: bytes
    event_sync: bool


@dataclass(frozen=True, slots=True)
class CudaPart:
    """A region of the source's pool, inside one of its storages."""

    storage: U32
    stride: U64
    offset: U64
    nbytes: U64


@dataclass(frozen=True, slots=True)
class CudaPool:
    """The source's pool."""

    device: str  # its UUID
    storages: list[Handle]
    num_blocks: U32
    groups: list[list[CudaPart]]


SCHEMA: Final = Schema({1: ("pool", CudaPool)}, MAX_HANDSHAKE_BYTES)


class CudaIpcExporter:
    """Shares the storages of a pool's tensors."""

    name = NAME
    in_band = False

    def __init__(self, pool: KvPool) -> None:
        """Raises ValueError for a pool that does not lie in tensors."""
        if any(isinstance(r.memory, memoryview) for group in pool.groups for r in group):
            raise ValueError("only a pool in device memory can be shared by CUDA IPC")
        self._pool = pool

    def describe(self) -> tuple[bytes, list[int]]:
        # A new handle for each client: torch counts those who hold one.
        storages: dict[int, torch.UntypedStorage] = {}
        groups: list[list[CudaPart]] = []
        for group in self._pool.groups:
            parts: list[CudaPart] = []
            for region in group:
                memory = cast("torch.Tensor", region.memory)
                storage = memory.untyped_storage()
                storages.setdefault(storage.data_ptr(), storage)
                index = list(storages).index(storage.data_ptr())
                offset = region.offset + int(memory.storage_offset())
                parts.append(CudaPart(index, region.stride, offset, region.nbytes))
            groups.append(parts)
        memory = cast("torch.Tensor", self._pool.groups[0][0].memory)
        handles = [share(storage) for storage in storages.values()]
        pool = CudaPool(device_uuid(memory.device.index), handles, self._pool.num_blocks, groups)
        return SCHEMA.encode(pool), []

    def close(self) -> None:
        """The memory is the engine's."""


class CudaIpcMover:
    """Copies on a stream of its own; `thread` waits for it."""

    def __init__(self, pool: KvPool, about: bytes, thread: ThreadPoolExecutor) -> None:
        """Raises LinkBroken if the source's memory cannot be mapped here."""
        self._thread = thread
        try:
            theirs: CudaPool = SCHEMA.decode(about)
        except WireError as error:
            raise LinkBroken(f"its pool: {error}") from error
        check_sizes([[part.nbytes for part in group] for group in theirs.groups], pool)
        self.num_blocks = theirs.num_blocks
        self.broken: str | None = None
        try:
            device = device_number(theirs.device)
            storages = [open_shared(handle, device) for handle in theirs.storages]
            self._theirs = [
                [_rows(storages, p, theirs.num_blocks) for p in group] for group in theirs.groups
            ]
        except (RuntimeError, IndexError) as error:  # what torch and CUDA raise
            raise LinkBroken(f"its device memory cannot be mapped: {error}") from error
        self._ours = [[blocks_of(r, pool.num_blocks) for r in group] for group in pool.groups]
        self._stream = side_stream(self._ours[0][0].device)

    async def move(self, moves: list[Move], stop: StopWriting) -> None:
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._thread, self._copy, moves, stop)
        try:
            await asyncio.shield(copying)
        except RuntimeError as error:
            raise LinkBroken(f"a copy between devices failed: {error}") from error
        finally:
            if not copying.done():
                stop.asked = True
                await settled(copying)

    def _copy(self, moves: list[Move], stop: StopWriting) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            for move in moves:
                if stop.asked:
                    break
                parts = zip(self._theirs[move.group], self._ours[move.group], strict=True)
                for theirs, ours in parts:
                    for at, count in runs(move.theirs, move.ours):
                        source, target = move.theirs[at], move.ours[at]
                        ours[target : target + count].copy_(
                            theirs[source : source + count], non_blocking=True
                        )
        if self._stream is not None:
            self._stream.synchronize()  # also when asked to stop: what was begun still writes

    def close(self) -> None:
        """The mapping goes with the last tensor on it."""


def _rows(storages: list[Any], part: CudaPart, num_blocks: int) -> torch.Tensor:
    """A region as [num_blocks, nbytes]; torch checks that it lies inside its storage."""
    import torch

    storage = storages[part.storage]
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    shape, strides = (num_blocks, part.nbytes), (part.stride, 1)
    end = part.offset + (num_blocks - 1) * part.stride + part.nbytes
    if num_blocks == 0 or end > storage.nbytes():
        raise RuntimeError("its pool is larger than its memory")
    return memory.set_(storage, part.offset, shape, strides)


# --- what needs a GPU ---


def device_uuid(number: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(number).uuid)


def device_number(uuid: str) -> int:
    """Raises RuntimeError if this process does not see that device."""
    import torch

    for number in range(torch.cuda.device_count()):
        if device_uuid(number) == uuid:
            return number
    raise RuntimeError(f"device {uuid} is not visible here")


def share(storage: Any) -> Handle:
    """Lets another process map this memory."""
    _, *rest = storage._share_cuda_()
    return Handle(*rest)


def open_shared(handle: Handle, device: int) -> Any:
    """Maps another process's memory."""
    import torch

    return torch.UntypedStorage._new_shared_cuda(  # pyright: ignore[reportPrivateUsage]
        device,
        handle.handle,
        handle.size,
        handle.offset,
        handle.ref_counter,
        handle.ref_counter_offset,
        handle.event,
        handle.event_sync,
    )


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One that does not wait for the forward pass in flight. None where there are no streams."""
    import torch

    return torch.cuda.Stream(device) if device.type == "cuda" else None

"""A pool's memory as bytes that a socket can read and write: in place on a CPU, through pinned memory on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from headrace.kv_transfer.backends.base import LinkBroken

if TYPE_CHECKING:
    import torch

    from headrace_kernels.ops import KvPool, KvRegion

# First block, and how many one after the other.
Run: TypeAlias = tuple[int, int]


class Memory(Protocol):
    """One connection's way to the pool. The order of bytes is region by region, in each block by block."""

    def outgoing(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of these segments. Valid until the next call."""
        ...

    def incoming(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """Where these segments are to be written."""
        ...

    def landed(self, group: int, blocks: Sequence[int]) -> None:
        """What `incoming` gave has been filled, and is right."""
        ...


def open_memory(pool: KvPool) -> Memory:
    """Raises ValueError for a pool of mixed memory."""
    kinds = {isinstance(region.memory, memoryview) for group in pool.groups for region in group}
    if kinds == {True}:
        return HostMemory(pool)
    if kinds == {False}:
        return DeviceMemory(pool)
    raise ValueError("a pool must lie in host memory or in tensors, not in both")


def runs(*columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where all columns count on by one: index of the first, and how many."""
    length = len(columns[0])
    start = 0
    for at in range(1, length + 1):
        if at == length or any(column[at] != column[at - 1] + 1 for column in columns):
            yield start, at - start
            start = at


def segment_bytes(pool: KvPool) -> list[int]:
    """Of one block, by group."""
    return [sum(region.nbytes for region in group) for group in pool.groups]


def check_sizes(theirs: Sequence[Sequence[int]], pool: KvPool) -> None:
    """Raises LinkBroken unless a source's regions, by group, have as many bytes of a block as ours."""
    if theirs != [[region.nbytes for region in group] for group in pool.groups]:
        raise LinkBroken("its pool has other regions than its layout says")


class HostMemory:
    """Bytes are sent from the pool and received into it."""

    def __init__(self, pool: KvPool) -> None:
        self._groups = pool.groups

    def outgoing(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        return self._views(group, blocks)

    def incoming(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        return self._views(group, blocks)

    def landed(self, group: int, blocks: Sequence[int]) -> None:
        """They are where they belong."""

    def _views(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        views: list[memoryview] = []
        for region in self._groups[group]:
            memory = cast(memoryview, region.memory)
            if region.stride == region.nbytes:
                for at, count in runs(blocks):
                    start = region.offset + blocks[at] * region.stride
                    views.append(memory[start : start + count * region.nbytes])
            else:
                starts = [region.offset + block * region.stride for block in blocks]
                views += [memory[start : start + region.nbytes] for start in starts]
        return views


class DeviceMemory:
    """Segments are gathered into, and scattered from, page-locked host memory, on a stream of their own.

    Works on tensors of any device; on a CPU (as in tests) there is no stream and nothing to lock.
    """

    def __init__(self, pool: KvPool) -> None:
        import torch

        self._torch = torch
        self._views = [[blocks_of(region, pool.num_blocks) for region in g] for g in pool.groups]
        self._device = self._views[0][0].device
        self._stream = (
            torch.cuda.Stream(self._device)  # it does not wait for the forward pass in flight
            if self._device.type == "cuda"
            else None
        )
        self._out = self._in = self._host(0)

    def outgoing(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        self._out = self._room(self._out, group, blocks)
        with self._torch.cuda.stream(self._stream):
            for view, part in self._parts(self._out, group, len(blocks)):
                part.copy_(view[list(blocks)], non_blocking=True)
        self._settle()
        return [self._out.numpy().data[: self._size(group, blocks)]]

    def incoming(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        self._in = self._room(self._in, group, blocks)
        return [self._in.numpy().data[: self._size(group, blocks)]]

    def landed(self, group: int, blocks: Sequence[int]) -> None:
        with self._torch.cuda.stream(self._stream):
            for view, part in self._parts(self._in, group, len(blocks)):
                view[list(blocks)] = part.to(self._device, non_blocking=True)
        self._settle()

    def _host(self, size: int) -> torch.Tensor:
        pinned = self._stream is not None
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=pinned)

    def _size(self, group: int, blocks: Sequence[int]) -> int:
        return len(blocks) * sum(view.shape[1] for view in self._views[group])

    def _room(self, host: torch.Tensor, group: int, blocks: Sequence[int]) -> torch.Tensor:
        size = self._size(group, blocks)
        return host if host.numel() >= size else self._host(size)

    def _parts(
        self, host: torch.Tensor, group: int, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for view in self._views[group]:
            stop = start + count * view.shape[1]
            yield view, host[start:stop].view(count, view.shape[1])
            start = stop

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def blocks_of(region: KvRegion, num_blocks: int) -> torch.Tensor:
    """A region in a tensor as `[num_blocks, nbytes]`."""
    memory = cast("torch.Tensor", region.memory)
    return memory.view(-1).as_strided(
        (num_blocks, region.nbytes), (region.stride, 1), memory.storage_offset() + region.offset
    )

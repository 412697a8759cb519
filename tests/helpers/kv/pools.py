"""KV pools of several shapes without a model, and sources whose progress a test decides."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from headrace_kernels.ops import KvPool, KvRegion

if TYPE_CHECKING:
    import torch

Shape = Literal["block-major", "layer-major", "tensor"]
SHAPES: tuple[Shape, ...] = ("block-major", "layer-major", "tensor")
LAYERS_PER_GROUP = 2


def make_pool(
    shape: Shape = "block-major",
    *,
    num_blocks: int = 16,
    groups: int = 3,
    layer_bytes: int = 96,
    seed: int | None = None,
) -> KvPool:
    """`block-major`: whole blocks one after the other, a region for each group. `layer-major`: for each layer all keys,
    then all values. `tensor`: as that, in a tensor, as on a device. With a seed its bytes are random, else zero."""
    layers = groups * LAYERS_PER_GROUP
    block_bytes = layers * layer_bytes
    size = num_blocks * block_bytes
    memfd = None
    if shape == "tensor":
        import torch

        memory: memoryview | torch.Tensor = torch.zeros(size, dtype=torch.uint8)
        plain = memory.numpy().data
    else:
        memfd = os.memfd_create("test-pool")
        os.ftruncate(memfd, size)
        memory = plain = memoryview(mmap.mmap(memfd, size))
    if seed is not None:
        plain[:] = random.Random(seed).randbytes(size)
    made: list[list[KvRegion]] = []
    for group in range(groups):
        if shape == "block-major":
            nbytes = LAYERS_PER_GROUP * layer_bytes
            made.append(
                [KvRegion(memory=memory, stride=block_bytes, offset=group * nbytes, nbytes=nbytes)]
            )
        else:
            half = layer_bytes // 2
            starts = range(2 * group * LAYERS_PER_GROUP, 2 * (group + 1) * LAYERS_PER_GROUP)
            made.append(
                [
                    KvRegion(
                        memory=memory, stride=half, offset=start * num_blocks * half, nbytes=half
                    )
                    for start in starts
                ]
            )
    return KvPool(
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        groups=made,
        device="cpu",
        memfd=memfd,
    )


def segment(pool: KvPool, block: int, group: int) -> bytes:
    """What a block has in a group."""
    parts: list[bytes] = []
    for region in pool.groups[group]:
        start = region.offset + block * region.stride
        if isinstance(region.memory, memoryview):
            parts.append(bytes(region.memory[start : start + region.nbytes]))
        else:
            parts.append(region.memory[start : start + region.nbytes].numpy().tobytes())
    return b"".join(parts)


def block_of(pool: KvPool, block: int) -> bytes:
    return b"".join(segment(pool, block, group) for group in range(len(pool.groups)))


def all_bytes(pool: KvPool) -> bytes:
    memory = pool.groups[0][0].memory
    return bytes(memory) if isinstance(memory, memoryview) else memory.numpy().tobytes()


def overwrite(pool: KvPool, value: int) -> None:
    memory = pool.groups[0][0].memory
    if isinstance(memory, memoryview):
        memory[:] = bytes([value]) * len(memory)
    else:
        memory.fill_(value)


@dataclass
class FakeSource:
    """Blocks of which `done` segments, (place, group) each, are computed; None means all are."""

    blocks: Sequence[int]
    done: set[tuple[int, int]] | None = None
    revoked: bool = False
    released: int = 0
    failed: int = 0
    asked: int = field(default=0, repr=False)  # calls of `ready`

    def ready(self, place: int, group: int) -> bool:
        self.asked += 1
        return self.done is None or (place, group) in self.done

    def on_released(self) -> None:
        self.released += 1

    def on_failed(self) -> None:
        self.failed += 1


def memory_of(pool: KvPool) -> memoryview:
    """Of a pool that is no tensor."""
    return cast(memoryview, pool.groups[0][0].memory)

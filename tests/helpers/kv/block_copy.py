"""Copies of KV blocks between pools of one process: the transfer without any transport."""

from __future__ import annotations

import torch

from headrace_kernels.ops import KvPool, KvRegion


def copy_block(source: KvPool, start: int, to: KvPool, stop: int, group: int | None = None) -> None:
    """Block `start` of `source` to block `stop` of `to`: one layer group of it, or all."""
    for i, (theirs, ours) in enumerate(zip(source.groups, to.groups, strict=True)):
        if group is None or group == i:
            for here, there in zip(theirs, ours, strict=True):
                block_bytes(there, stop)[:] = block_bytes(here, start)


def block_bytes(region: KvRegion, block: int) -> memoryview:
    """What the region holds of the block, writable."""
    assert not isinstance(region.memory, torch.Tensor), "a pool on the CPU"
    start = region.offset + block * region.stride
    return region.memory[start : start + region.nbytes]

"""Where the backends say that the blocks are, and when they say that a layer group is written."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.models import Batch
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.ops import Backend, Fence, KvPool, Results, layer_groups
from headrace_kernels.torch_ops import REFERENCE, TorchBackend
from helpers.kernels.tensor_backend import TensorBackend
from helpers.kv.block_copy import block_bytes, copy_block
from helpers.models.stepping import Stepper
from helpers.models.tiny_model import tiny_llama

BLOCK = 16
LAYERS = 19  # groups of 8, 8 and 3
BLOCKS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    path: Path = tmp_path_factory.mktemp("deep")
    return SafetensorsCheckpoint(tiny_llama(path, num_hidden_layers=LAYERS, hidden_size=32))


def load(checkpoint: SafetensorsCheckpoint, kind: str) -> Llama:
    attention = attention_of(checkpoint.config, BLOCK)
    backend: Backend
    if kind == "torch":
        backend = TorchBackend(attention, dtype="bfloat16", device="cpu", kernels=REFERENCE)
    else:
        backend = TensorBackend(attention, dtype=kind)
    model = Llama(checkpoint.config, load_weights(checkpoint, backend), backend, BLOCK)
    model.allocate_kv(BLOCKS)
    return model


def whole(pool: KvPool, group: int) -> bytes:
    return b"".join(
        block_bytes(region, block).tobytes()
        for region in pool.groups[group]
        for block in range(pool.num_blocks)
    )


@contextmanager
def progress_of(model: Llama) -> Generator[list[tuple[int, bytes]]]:
    """Makes every forward of `model` keep what the group just finished holds."""
    told: list[tuple[int, bytes]] = []
    forward, pool = model.forward, model.kv_pool()

    def progress(groups: int, fence: Fence | None = None) -> None:
        assert fence is None
        told.append((groups, whole(pool, groups - 1)))

    def watched(batch: Batch) -> Results:
        return forward(batch, progress)

    model.forward = watched  # type: ignore[assignment, method-assign]
    yield told
    model.forward = forward


def test_layers_are_grouped_with_a_shorter_last_group() -> None:
    assert layer_groups(19) == [range(8), range(8, 16), range(16, 19)]
    assert layer_groups(8) == [range(8)]
    assert layer_groups(2) == [range(2)]


@pytest.mark.parametrize("kind", ["float32", "torch"])
def test_regions_tile_the_pool(checkpoint: SafetensorsCheckpoint, kind: str) -> None:
    model = load(checkpoint, kind)
    pool = model.kv_pool()
    assert (pool.num_blocks, pool.block_bytes) == (BLOCKS, model.kv_block_bytes)
    regions = [region for group in pool.groups for region in group]
    assert sum(region.nbytes for region in regions) == pool.block_bytes
    for mark, (region, block) in enumerate((r, b) for r in regions for b in range(BLOCKS)):
        block_bytes(region, block)[:] = bytes([mark % 251]) * region.nbytes
    for mark, (region, block) in enumerate((r, b) for r in regions for b in range(BLOCKS)):
        assert set(block_bytes(region, block)) == {mark % 251}, "two parts share bytes"
    assert "layers_per_group=8" in model.kv_layout


@pytest.mark.parametrize("kind", ["float32", "int8", "torch"])
def test_a_group_is_final_when_it_is_told(checkpoint: SafetensorsCheckpoint, kind: str) -> None:
    model = load(checkpoint, kind)
    plain, watched = (np.random.default_rng(1).integers(0, 280, 90).tolist() for _ in range(2))
    stepper = Stepper(model, BLOCK, BLOCKS)
    want = stepper.whole(plain)
    stepper = Stepper(model, BLOCK, BLOCKS)
    pool = model.kv_pool()
    with progress_of(model) as told:
        got = stepper.whole(watched)
    assert torch.equal(got, want)
    assert [groups for groups, _ in told] == [1, 2, 3]
    for groups, then in told:
        assert then == whole(pool, groups - 1), "written to after it was told"


@pytest.mark.parametrize("kind", ["float32", "int8", "torch"])
def test_copied_blocks_go_on_as_if_computed_here(
    checkpoint: SafetensorsCheckpoint, kind: str
) -> None:
    here, there = load(checkpoint, kind), load(checkpoint, kind)
    tokens = np.random.default_rng(2).integers(0, 280, 64).tolist()
    one, other = Stepper(here, BLOCK, BLOCKS), Stepper(there, BLOCK, BLOCKS)
    source, to = one.stream(tokens), other.stream(tokens, cached=0)
    one.step([(source, 40)])
    other._free.reverse()  # pyright: ignore[reportPrivateUsage] - other blocks than theirs
    to.blocks = [other._free.pop() for _ in source.blocks]  # pyright: ignore[reportPrivateUsage]
    for group in range(len(here.kv_pool().groups)):
        for start, stop in zip(source.blocks, to.blocks, strict=True):
            copy_block(here.kv_pool(), start, there.kv_pool(), stop, group)
    to.computed = source.computed
    assert torch.equal(other.step([(to, 24)])[0], one.step([(source, 24)])[0])


def test_what_progress_raises_comes_out_of_forward(checkpoint: SafetensorsCheckpoint) -> None:
    model = load(checkpoint, "float32")
    forward = model.forward

    def progress(groups: int, fence: Fence | None = None) -> None:
        raise LookupError("from progress")

    model.forward = lambda batch: forward(batch, progress)  # type: ignore[assignment, method-assign, misc]
    with pytest.raises(LookupError, match="from progress"):
        Stepper(model, BLOCK, BLOCKS).whole([1, 2, 3])


def test_the_pool_can_be_shown_to_others_but_not_changed_by_them(
    checkpoint: SafetensorsCheckpoint,
) -> None:
    model = load(checkpoint, "float32")
    pool = model.kv_pool()
    assert pool.memfd is not None
    size = BLOCKS * pool.block_bytes
    region = pool.groups[1][0]
    block_bytes(region, 3)[:5] = b"hello"
    seen = mmap.mmap(pool.memfd, size, access=mmap.ACCESS_READ)
    at = region.offset + 3 * region.stride
    assert seen[at : at + 5] == b"hello"
    with pytest.raises(PermissionError):
        mmap.mmap(pool.memfd, size)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.memfd, 4096)


def test_memory_goes_with_its_last_user(checkpoint: SafetensorsCheckpoint) -> None:
    model = load(checkpoint, "float32")
    old = model.kv_pool()
    assert old.memfd is not None
    before = os.fstat(old.memfd).st_ino
    model.allocate_kv(2 * BLOCKS)
    assert model.kv_pool().num_blocks == 2 * BLOCKS
    assert os.fstat(old.memfd).st_ino == before  # `old` holds it
    memfd = old.memfd
    del old
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memfd)

"""A step that points outside of the native cache, or of its own rows, is refused by name and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace_kernels.ops import Attention, ForwardPass, MlaAttention, MlaStep, Value
from helpers.kernels.paged_rows import BLOCK, PagedRows, cache_floats
from helpers.kernels.tensor_backend import TensorBackend

HEADS, DIM, LORA, ROPE = 2, 8, 8, 4
LENGTHS = [20, 5]  # blocks: two, and one beside which the table has an entry that nobody reads
BLOCKS = 3

DENSE = Attention(
    layers=1,
    heads=HEADS,
    kv_heads=1,
    head_dim=DIM,
    block_tokens=BLOCK,
    context_tokens=4096,
    scale=1.0,
    inv_freq=[1.0] * (DIM // 2),
    rope_scale=1.0,
)
LATENT = MlaAttention(
    layers=1,
    heads=HEADS,
    kv_lora_rank=LORA,
    nope_dim=DIM - ROPE,
    rope_dim=ROPE,
    v_dim=DIM,
    block_tokens=BLOCK,
    context_tokens=4096,
    scale=1.0,
    inv_freq=[1.0] * (ROPE // 2),
    rope_scale=1.0,
    rope_interleave=True,
    hidden_size=0,
    mtp=False,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(backend: TensorBackend, step: ForwardPass) -> Value:
    x = step.embed(backend.table(noise(sum(LENGTHS), (HEADS + 2) * DIM)))
    return step.wanted_rows(step.paged_attention(step.rope_and_store_kv(x, 0), 0))


def latent(backend: TensorBackend, step: MlaStep) -> Value:
    queries, width = HEADS * DIM, HEADS * DIM + LORA + ROPE
    x = step.embed(backend.table(noise(sum(LENGTHS), width)))
    norm = backend.vector(noise(LORA, seed=1))
    kv_b = backend.head_matrices(noise(HEADS, 2 * DIM - ROPE, LORA, seed=2))
    stored = step.mla_store(
        step.columns(x, 0, queries), step.columns(x, queries, width), norm, 1e-6, 0
    )
    return step.wanted_rows(step.mla_attention(stored, kv_b, 0))


@pytest.mark.parametrize("family", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("block_tables", BLOCKS),
        ("slots", BLOCKS * BLOCK),
        ("logit_rows", sum(LENGTHS)),
    ],
)
def test_what_points_outside_is_refused(
    family: Attention | MlaAttention, field: str, limit: int
) -> None:
    backend = TensorBackend(family, dtype="float32")
    describe = latent if isinstance(family, MlaAttention) else dense
    run = backend.compile(lambda step: describe(backend, step))
    backend.allocate_kv(BLOCKS)
    rows = PagedRows(LENGTHS)
    assert rows.num_blocks == BLOCKS
    good = rows.batch(rows.whole())
    want = run(good).clone()
    cache = cache_floats(backend).copy()
    values = getattr(good, field)
    for bad in (-1, limit, np.iinfo(values.dtype).max, np.iinfo(values.dtype).min):
        for at in (0, -1):  # -1 of the tables: where a sequence has fewer blocks than another
            spoiled = values.copy()
            spoiled.flat[at] = bad
            with pytest.raises(
                ValueError, match=rf"{field} holds {bad}, which is not below {limit}$"
            ):
                run(replace(good, **{field: spoiled}))
    assert np.array_equal(cache_floats(backend), cache)
    assert torch.equal(run(good), want)

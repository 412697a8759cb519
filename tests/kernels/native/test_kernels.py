"""Native CPU kernels against float64 references, at sizes that fill no vector and no tile."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace_kernels.batch import Batch
from headrace_kernels.ops import Attention, ForwardPass, Value
from helpers.kernels.tensor_backend import TensorBackend
from helpers.require import missing

Describe = Callable[[TensorBackend, ForwardPass, Value], Value]
BLOCK = 16


@pytest.fixture(params=["avx512", "avx2", "portable"])
def simd(request: pytest.FixtureRequest) -> str:
    """Every instruction set that the machine has."""
    try:
        compute(
            noise(1, 16), lambda b, s, v: s.linear(v, b.matrix([noise(2, 16)])), simd=request.param
        )
    except ValueError as error:
        if "this machine has no level" not in str(error):
            raise
        missing(request.param, str(error))
    return request.param


def compute(
    x: torch.Tensor,
    describe: Describe,
    *,
    dtype: str = "float32",
    heads: tuple[int, int, int] = (2, 1, 8),
    seqs: list[int] | None = None,
    simd: str | None = None,
) -> torch.Tensor:
    """`describe` of the rows of `x`, which come in as embeddings; rows belong to sequences of lengths `seqs`."""
    rows = len(x)
    attention = Attention(
        layers=1,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        block_tokens=BLOCK,
        context_tokens=4096,
        scale=heads[2] ** -0.5,
        inv_freq=[0.0] * (heads[2] // 2),  # positions turn nothing: rope has its own test
        rope_scale=1.0,
    )
    backend = TensorBackend(attention, dtype=dtype, simd=simd)
    table = backend.table(x)
    run = backend.compile(lambda step: step.wanted_rows(describe(backend, step, step.embed(table))))
    lengths = seqs or [rows]
    blocks = [math.ceil(n / BLOCK) for n in lengths]
    backend.allocate_kv(sum(blocks))
    order = np.random.default_rng(3).permutation(sum(blocks)).tolist()
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    for s, n in enumerate(blocks):
        tables[s, :n] = [order.pop() for _ in range(n)]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return run(
        Batch(
            tokens=np.arange(rows, dtype=np.int32),
            positions=positions,
            slots=tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
            seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=np.array(lengths, np.int32),
            block_tables=tables,
            logit_rows=np.arange(rows, dtype=np.int32),
        )
    ).clone()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 13])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 65), (64, 576), (100, 7)])
def test_linear(rows: int, n: int, k: int) -> None:
    x, w, bias = noise(rows, k), noise(n, k, seed=1), noise(n, seed=2)
    y = compute(x, lambda b, step, v: step.linear(v, b.matrix([w[: n // 2], w[n // 2 :]], bias)))
    want = x.double() @ w.double().T + bias.double()
    # Sequential sums of k products of about 1: their rounding grows with the square root of k.
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-7 * k**0.5 * 10)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_with_16_bit_weights_is_that_of_the_rounded_weights(
    stored: torch.dtype, dtype: str
) -> None:
    x, w = noise(5, 70), noise(40, 70, seed=1).to(stored)
    y = compute(x, lambda b, step, v: step.linear(v, b.matrix([w])), dtype=dtype)
    rounded = w.float().to(getattr(torch, dtype)).float()
    assert torch.equal(y, compute(x, lambda b, step, v: step.linear(v, b.matrix([rounded]))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_linear_has_the_same_bits_in_any_company(dtype: str, simd: str) -> None:
    x, w = noise(500, 150), noise(70, 150, seed=1)

    def linear(x: torch.Tensor, simd: str | None) -> torch.Tensor:
        return compute(x, lambda b, s, v: s.linear(v, b.matrix([w])), dtype=dtype, simd=simd)

    many = linear(x, simd)
    for start, end in ((0, 1), (7, 13), (100, 131), (499, 500)):
        assert torch.equal(linear(x[start:end], None), many[start:end])


@pytest.mark.parametrize("width", [1, 16, 17, 576])
def test_rms_norm(width: int) -> None:
    x, w = 3 * noise(4, width), noise(width, seed=1)
    y = compute(x, lambda b, step, v: step.rms_norm(v, b.vector(w), 1e-5))
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(y.double(), x.double() * scale * w.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 15, 48])
def test_silu_mul_also_at_its_extremes(width: int) -> None:
    x = 30 * noise(3, 2 * width)
    x[0, 0], x[1, 0] = -1e4, 1e4
    y = compute(x, lambda _, step, v: step.silu_mul(v))
    gate, up = x.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [(1, 1, 8), (4, 2, 16), (9, 3, 64), (6, 1, 20), (14, 1, 16)])
@pytest.mark.parametrize("seqs", [[1], [5, 1, 63], [64, 65], [200]])
def test_paged_attention(heads: tuple[int, int, int], seqs: list[int]) -> None:
    q_heads, kv_heads, dim = heads
    qkv = 2 * noise(sum(seqs), (q_heads + 2 * kv_heads) * dim)
    y = compute(
        qkv,
        lambda _, step, v: step.paged_attention(step.rope_and_store_kv(v, 0), 0),
        heads=heads,
        seqs=seqs,
    )
    for rows, out in zip(qkv.double().split(seqs), y.split(seqs), strict=True):
        q, k, v = rows.view(len(rows), -1, dim).transpose(0, 1).split((q_heads, kv_heads, kv_heads))
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        want = want.transpose(0, 1).reshape(len(rows), -1)
        # Scores reach 30, where a float32 is 2e-6 apart, and exp makes that relative.
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)


def test_attention_survives_scores_that_overflow_a_plain_softmax() -> None:
    qkv = torch.zeros(70, 24)
    qkv[:, :8] = 100.0
    qkv[:, 8:16] = noise(70, 8) * 100
    qkv[:, 16:] = noise(70, 8, seed=1)
    y = compute(
        qkv,
        lambda _, step, v: step.paged_attention(step.rope_and_store_kv(v, 0), 0),
        heads=(1, 1, 8),
    )
    assert torch.isfinite(y).all() and y.abs().max() <= qkv[:, 16:].abs().max() * 1.0001


@pytest.mark.parametrize("heads", [(1, 1, 8), (9, 3, 64), (14, 1, 16)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_no_number_reaches_the_rows_that_see_it_and_no_older_one(
    simd: str, bad: float, heads: tuple[int, int, int]
) -> None:
    """Rows of a prompt go through in tiles, up to the newest one's position: 0 * NaN would spoil the older ones."""
    q_heads, kv_heads, dim = heads
    seqs = [3, 150]

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        return compute(
            qkv,
            lambda _, step, v: step.paged_attention(step.rope_and_store_kv(v, 0), 0),
            heads=heads,
            seqs=seqs,
            simd=simd,
        )

    qkv = noise(sum(seqs), (q_heads + 2 * kv_heads) * dim)
    before = attend(qkv)
    for position in (0, 1, 63, 64, 70, 149):
        for part in (q_heads, q_heads + kv_heads):  # a key, a value
            spoiled = qkv.clone()
            spoiled[3 + position, part * dim + 1] = bad
            after = attend(spoiled)
            assert torch.equal(after[: 3 + position], before[: 3 + position])
            assert not after[3 + position :, 1].isfinite().any()

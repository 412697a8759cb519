"""Bytes and flops that kernels say they need, against arrays of the documented shapes, and what torch counts.

The bytes are those of tensors on torch's device "meta", which have a size and no memory. The flops are those that
`torch.utils.flop_counter` sees in the torch reference. Some numbers of DeepSeek-R1 are published, and stand here.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from headrace_kernels.attention.head_linear import (
    head_linear_bytes,
    head_linear_flops,
    head_linear_ref,
)
from headrace_kernels.attention.merge_spans import merge_spans_bytes
from headrace_kernels.attention.mla_attention import (
    mla_attention_bytes,
    mla_attention_flops,
    mla_attention_ref,
)
from headrace_kernels.attention.mla_prefill import (
    mla_prefill_bytes,
    mla_prefill_flops,
    mla_prefill_ref,
    prefill_plan,
)
from headrace_kernels.attention.mla_store import mla_store_bytes
from headrace_kernels.dense.fp8_linear import (
    fp8_linear_bytes,
    fp8_linear_flops,
    fp8_linear_ref,
    fp8_matrix,
)
from headrace_kernels.dense.fp8_quantise import quantise_rows_bytes
from headrace_kernels.moe.combine import combine_bytes
from headrace_kernels.moe.fp8_grouped_linear import (
    fp8_experts,
    fp8_grouped_linear_bytes,
    fp8_grouped_linear_flops,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.grouped_linear import (
    grouped_linear_bytes,
    grouped_linear_flops,
    grouped_linear_ref,
)
from headrace_kernels.moe.permute import permute_bytes, permute_ref
from headrace_kernels.moe.route import route_bytes

R1 = {"kv_lora": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128}
SMALL = {"kv_lora": 12, "rope_dim": 6, "nope_dim": 10, "v_dim": 8}
HALF, E4M3, FLOAT, INT = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
ROWS, HEADS, KEYS = 3, 5, 7
BLOCK_TOKENS = 4


def array(dtype: torch.dtype, *shape: int) -> int:
    """Bytes of such an array."""
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def counted(work: Callable[[], object]) -> int:
    """Flops of the products that `work` does."""
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def blocks_of(columns: int) -> int:
    return math.ceil(columns / 128)


def cache_of(keys: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A paged cache of one sequence, and its table."""
    blocks = math.ceil(keys / BLOCK_TOKENS)
    return torch.randn(blocks, BLOCK_TOKENS, width), torch.arange(blocks, dtype=INT)[None]


def latent_arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of `ROWS`, `kv_b`, and the paged latents of `KEYS`, in the small sizes."""
    kv_lora, rope, nope, v = SMALL.values()
    cache, table = cache_of(KEYS, kv_lora + rope)
    return (
        torch.randn(ROWS, HEADS, nope + rope),
        torch.randn(HEADS, nope + v, kv_lora),
        cache,
        table,
    )


def test_a_key_of_r1_costs_1152_bytes_and_278528_flops_absorbed() -> None:
    """576 values of two bytes; 2 * 128 heads * (512 + 64 for the score, 512 for the sum)."""

    def costs(keys: int) -> tuple[int, int]:
        moved = mla_attention_bytes(keys, 1, 128, **R1, element_bytes=2, cache_bytes=2)
        return moved, mla_attention_flops(keys, 1, 128, **R1)

    (bytes_1, flops_1), (bytes_2, flops_2) = costs(1000), costs(1001)
    assert (bytes_2 - bytes_1, flops_2 - flops_1) == (1152, 278_528)


def test_absorbed_attention() -> None:
    q, kv_b, cache, table = latent_arrays()
    zeros = torch.zeros(ROWS, dtype=INT)
    last = torch.full((ROWS,), KEYS - 1, dtype=INT)  # every row sees all keys
    plan = cast("Any", None)  # the reference has no use for it

    def attend() -> object:
        return mla_attention_ref(
            q, kv_b, cache, table, zeros, last, zeros[:1], scale=1.0, plan=plan
        )

    assert mla_attention_flops(ROWS * KEYS, ROWS, HEADS, **SMALL) == counted(attend)
    moved = array(HALF, *q.shape) + array(HALF, *kv_b.shape) + array(HALF, ROWS, HEADS, 8)
    for dtype in (E4M3, HALF):
        widths = {"element_bytes": 2, "cache_bytes": dtype.itemsize}
        found = mla_attention_bytes(KEYS, ROWS, HEADS, **SMALL, **widths)
        assert found == moved + array(dtype, KEYS, 12 + 6)


def test_attention_over_keys_that_are_made_first() -> None:
    q, kv_b, cache, table = latent_arrays()
    plan = prefill_plan([0, ROWS], [KEYS], torch.device("cpu"))

    def attend() -> object:
        return mla_prefill_ref(q, kv_b, cache, table, torch.zeros(1, dtype=INT), plan, scale=1.0)

    # the reference computes hidden pairs too
    assert mla_prefill_flops(KEYS, ROWS * KEYS, HEADS, **SMALL) == counted(attend)
    made = array(HALF, HEADS, KEYS, 10) + array(HALF, HEADS, KEYS, 8)
    moved = array(HALF, *q.shape) + array(HALF, *kv_b.shape) + array(HALF, ROWS, HEADS, 8)
    moved += array(E4M3, KEYS, 12 + 6) + 2 * made  # written, and read again
    widths = {"element_bytes": 2, "cache_bytes": 1}
    assert mla_prefill_bytes(KEYS, ROWS, HEADS, **SMALL, **widths) == moved


def test_products_of_heads() -> None:
    x, weight = torch.randn(ROWS, HEADS, 10), torch.randn(HEADS, 10, 12)
    flops = counted(lambda: head_linear_ref(x, weight))
    assert head_linear_flops(ROWS, HEADS, 10, 12) == flops
    moved = array(HALF, *x.shape) + array(HALF, *weight.shape) + array(HALF, ROWS, HEADS, 12)
    assert head_linear_bytes(ROWS, HEADS, 10, 12, 2) == moved


def test_products_with_e4m3_weights() -> None:
    n_in, n_out = 200, 150  # neither is whole blocks of 128
    matrix = fp8_matrix([(torch.zeros(n_out, n_in).to(E4M3), torch.ones(2, 2))])
    x = torch.randn(ROWS, n_in)
    assert fp8_linear_flops(ROWS, n_in, n_out) == counted(lambda: fp8_linear_ref(x, matrix))
    moved = array(E4M3, ROWS, n_in) + array(FLOAT, ROWS, blocks_of(n_in))
    moved += sum(part.nbytes for part in (matrix.weight, matrix.scale, matrix.row_block))
    moved += array(HALF, ROWS, n_out)
    assert fp8_linear_bytes(ROWS, n_in, n_out, 2) == moved


@pytest.mark.parametrize("rows", [1, 4])
def test_products_of_experts(rows: int) -> None:
    n_in, n_out, experts, top_k = 200, 150, 3, 2
    permutation = permute_ref(torch.tensor([[0, 2]] * rows, dtype=INT), experts)
    pairs = rows * top_k  # of two busy experts
    x = torch.randn(rows, n_in)

    def plain() -> object:
        return grouped_linear_ref(x, torch.randn(experts, n_out, n_in), permutation, gather=True)

    assert grouped_linear_flops(pairs, n_in, n_out) == counted(plain)
    ends = array(HALF, pairs, n_in) + array(HALF, pairs, n_out)
    moved = array(HALF, 2, n_out, n_in) + ends
    assert grouped_linear_bytes(pairs, 2, n_in, n_out, 2) == moved

    matrix = fp8_matrix([(torch.zeros(n_out, n_in).to(E4M3), torch.ones(2, 2))])
    weight = fp8_experts([matrix] * experts)

    def scaled() -> object:
        return fp8_grouped_linear_ref(x, weight, permutation, gather=True)

    assert fp8_grouped_linear_flops(pairs, n_in, n_out) == counted(scaled)
    moved = 2 * (array(E4M3, n_out, n_in) + array(FLOAT, blocks_of(n_out), blocks_of(n_in)))
    moved += array(E4M3, pairs, n_in) + array(FLOAT, pairs, blocks_of(n_in))
    moved += array(HALF, pairs, n_out)
    assert fp8_grouped_linear_bytes(pairs, 2, n_in, n_out, 2) == moved


def test_what_only_moves() -> None:
    turned, latent = array(HALF, ROWS, HEADS, 64), array(HALF, ROWS, 512 + 64)
    stored = 2 * turned + latent + array(E4M3, ROWS, 512 + 64)
    assert mla_store_bytes(ROWS, HEADS, 512, 64, 2, 1) == stored

    spans = 2 * ROWS
    merged = array(FLOAT, spans, HEADS, 512) + array(FLOAT, spans, HEADS)
    merged += array(HALF, ROWS, HEADS, 512)
    assert merge_spans_bytes(spans, ROWS, HEADS, 512, 2) == merged

    quantised = array(HALF, ROWS, 200) + array(E4M3, ROWS, 200) + array(FLOAT, ROWS, 2)
    assert quantise_rows_bytes(ROWS, 200, 2) == quantised

    routed = array(FLOAT, ROWS, 256) + array(INT, ROWS, 8) + array(FLOAT, ROWS, 8)
    assert route_bytes(ROWS, 256, 8) == routed

    permuted = 3 * array(INT, ROWS, 8) + array(INT, 256 + 1)  # ids; pairs, places and offsets
    assert permute_bytes(ROWS, 8, 256) == permuted

    combined = array(HALF, ROWS, 8, 7168) + 2 * array(HALF, ROWS, 7168)
    combined += array(INT, ROWS, 8) + array(FLOAT, ROWS, 8)
    assert combine_bytes(ROWS, 8, 7168, 2) == combined

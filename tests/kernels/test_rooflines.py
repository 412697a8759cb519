"""Bytes and flops that kernels say they need, against what DeepSeek-R1's sizes give by hand."""

import pytest

pytest.importorskip("triton")

from headrace_kernels.attention.head_linear import head_linear_bytes, head_linear_flops
from headrace_kernels.attention.merge_spans import merge_spans_bytes
from headrace_kernels.attention.mla_attention import mla_attention_bytes, mla_attention_flops
from headrace_kernels.attention.mla_prefill import mla_prefill_bytes, mla_prefill_flops
from headrace_kernels.attention.mla_store import mla_store_bytes
from headrace_kernels.dense.fp8_linear import fp8_linear_bytes, fp8_linear_flops
from headrace_kernels.dense.fp8_quantise import quantise_rows_bytes
from headrace_kernels.moe.combine import combine_bytes
from headrace_kernels.moe.fp8_grouped_linear import (
    fp8_grouped_linear_bytes,
    fp8_grouped_linear_flops,
)
from headrace_kernels.moe.grouped_linear import grouped_linear_bytes, grouped_linear_flops
from headrace_kernels.moe.permute import permute_bytes
from headrace_kernels.moe.route import route_bytes

LATENT = {"kv_lora": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128}
BF16 = {"element_bytes": 2, "cache_bytes": 2}


def test_a_key_costs_1152_bytes_and_278528_flops_absorbed() -> None:
    def costs(keys: int) -> tuple[int, int]:
        flops = mla_attention_flops(keys, 1, 128, **LATENT)
        return mla_attention_bytes(keys, 1, 128, **LATENT, **BF16), flops

    (bytes_1, flops_1), (bytes_2, flops_2) = costs(1000), costs(1001)
    assert bytes_2 - bytes_1 == 1152
    assert flops_2 - flops_1 == 278_528
    weights = 2 * 128 * 256 * 512  # kv_b, once
    assert bytes_1 - 1000 * 1152 - weights == 2 * 128 * (192 + 128)  # the row itself
    assert flops_1 - 1000 * 278_528 == 2 * 128 * 256 * 512  # its query and value


def test_a_prompt_of_4096_costs_its_pairs_and_its_expansion() -> None:
    pairs = 4096 * 4097 // 2
    flops = mla_prefill_flops(4096, pairs, 128, **LATENT)
    assert flops == pairs * 81_920 + 4096 * 2 * 128 * 512 * 256
    moved = mla_prefill_bytes(4096, 4096, 128, **LATENT, **BF16)
    expanded = 2 * 4096 * 128 * 256 * 2  # keys and values, out and in
    assert moved - expanded == 4096 * 1152 + 2 * 4096 * 128 * 320 + 2 * 128 * 256 * 512


def test_products_cost_their_weights_once() -> None:
    assert fp8_linear_flops(128, 7168, 2112) == head_linear_flops(128, 1, 7168, 2112)
    rows_bytes = 7168 + 56 * 4 + 2112 * 2
    assert fp8_linear_bytes(2, 7168, 2112, 2) - fp8_linear_bytes(1, 7168, 2112, 2) == rows_bytes
    assert 15.1e6 < fp8_linear_bytes(1, 7168, 2112, 2) < 15.3e6
    assert head_linear_bytes(0, 128, 128, 512, 2) == 16_777_216
    assert grouped_linear_bytes(0, 8, 7168, 4096, 1) == 8 * 29_360_128
    assert grouped_linear_flops(3, 7168, 4096) == 3 * 58_720_256
    assert fp8_grouped_linear_bytes(0, 1, 7168, 4096, 2) == 29_360_128 + 4 * 56 * 32
    assert fp8_grouped_linear_flops(3, 7168, 4096) == 3 * 58_720_256


def test_the_rest_moves_its_rows() -> None:
    assert mla_store_bytes(1, 128, 512, 64, 2, 2) == 2 * 2 * 128 * 64 + 2 * 576 + 2 * 576
    assert merge_spans_bytes(2, 1, 128, 512, 2) == 4 * 2 * 128 * 513 + 2 * 128 * 512
    assert quantise_rows_bytes(1, 7168, 2) == 3 * 7168 + 4 * 56
    assert route_bytes(1, 256, 8) == 1024 + 64
    assert permute_bytes(4, 8, 256) == 4 * (96 + 257)
    assert combine_bytes(1, 8, 7168, 2) == 10 * 7168 * 2 + 64

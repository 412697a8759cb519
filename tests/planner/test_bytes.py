"""Bytes and operations of DeepSeek-R1 against figures that others published or that were worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from headrace.planner.model import shape
from headrace.planner.model.exchange import (
    COMBINE_ROW_BYTES,
    DISPATCH_ROW_BYTES,
    copies_sent,
    exchange_us,
)
from headrace.planner.model.gpus import GPUS
from headrace.planner.model.group import ExpertGroup


def nvfp4(ranks: int, gpu: str = "gb300") -> ExpertGroup:
    return ExpertGroup(gpu=GPUS[gpu], ranks=ranks, weights="nvfp4", linear="nvfp4", redundant=0)


def test_all_parameters_are_671_billion_and_those_of_a_token_37() -> None:
    experts = shape.MOE_LAYERS * shape.EXPERT
    own = shape.LAYERS * shape.ATTENTION + shape.DENSE_LAYERS * shape.DENSE_MLP
    own += shape.MOE_LAYERS * (shape.EXPERT + shape.ROUTER) + 2 * shape.HEAD
    # DeepSeek's model card.
    assert own + experts * shape.EXPERTS == pytest.approx(671.0e9, rel=1e-3)
    # a token's embedding is one row of the table, so that table does not count
    assert own - shape.HEAD + experts * shape.TOP_K == pytest.approx(37e9, rel=0.02)


def test_the_layer_that_drafts_has_11_5_billion_parameters() -> None:
    layer = shape.EXPERTS * shape.EXPERT + shape.EXPERT + shape.ATTENTION + shape.MTP_INPUT
    assert layer == pytest.approx(11.5e9, rel=0.02)  # DeepSeek's README_WEIGHTS.md


def test_a_token_of_kv_is_what_sglang_and_flashmla_say() -> None:
    assert shape.kv_token_bytes("fp8", drafts=False) == 35_136  # SGLang, GB300
    assert shape.kv_token_bytes("bf16", drafts=False) == 70_272
    assert shape.kv_token_bytes("bf16", drafts=True) * 131_072 == pytest.approx(
        8.72 * 2**30, rel=1e-3
    )


def test_a_rank_holds_what_sglang_found_on_gb300() -> None:
    # DEP16 in NVFP4: weights of about 40 GB; a request of 128k + 8k tokens has 4.45 GiB of KV
    assert nvfp4(16).weight_bytes == pytest.approx(40e9, rel=0.1)
    assert 136_000 * shape.kv_token_bytes("fp8", drafts=False) == pytest.approx(
        4.45 * 2**30, rel=0.01
    )


def test_memory_by_hand() -> None:
    # 32 experts of 44,040,192 bytes in 58 layers
    experts = 81_738_596_352
    # each product of a layer on its own: fp8, and bf16 where it says 2 *
    projections = 61 * (7168 * 2112 + 1536 * 24_576 + 16_384 * 7168)
    absorbed = 61 * 2 * (128 * 128 * 512 + 128 * 512 * 128)
    mlps = 3 * 3 * 7168 * 18_432 + 58 * 3 * 7168 * 2048
    tables = 58 * 2 * 256 * 7168 + 2 * 2 * 129_280 * 7168
    own = projections + absorbed + mlps + tables
    assert own == 20_099_825_664
    group = ExpertGroup(gpu=GPUS["h200"], ranks=8, weights="fp8", linear="fp8", redundant=0)
    assert group.weight_bytes == experts + own
    # 90 % of 141 GB, less weights and 4 GB, in tokens of 35,136 bytes
    assert group.kv_tokens == 599_430


def test_rows_on_the_way() -> None:
    assert DISPATCH_ROW_BYTES == {"fp8": 7392, "nvfp4": 4032}  # 7168 + 56 x 4; 3584 + 448
    assert COMBINE_ROW_BYTES == 14_336


def test_copies_against_counting_every_choice() -> None:
    # all 4^8 ways to choose 8 times among 4 ranks: how many ranks but one's own are chosen
    ways = itertools.product(range(4), repeat=8)
    elsewhere = sum(len(set(way) - {0}) for way in ways) / 4**8
    near, far = copies_sent(GPUS["h200"], 4, forwards=False)
    assert (near, far) == (pytest.approx(elsewhere), 0.0)


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_exchanges_over_the_network_take_what_deepep_measured(
    ranks: int, dispatch: float, combine: float
) -> None:
    # low-latency kernels on H800, 128 tokens a rank, fp8 out and bf16 back; in microseconds
    for row_bytes, step, measured in ((7392, "dispatch", dispatch), (14_336, "combine", combine)):
        us = exchange_us(GPUS["h800"], ranks, 128, row_bytes, step=step, forwards=False)
        assert us == pytest.approx(measured, rel=0.1)


def test_exchanges_over_nvlink_take_what_tensorrt_llm_measured() -> None:
    # one-sided kernels on GB200, EP64, 128 tokens a rank in bf16: 41.6 us out and 44.5 us back
    for step, measured in (("dispatch", 41.6), ("combine", 44.5)):
        us = exchange_us(GPUS["gb200"], 64, 128, 14_336, step=step, forwards=False)
        assert us == pytest.approx(measured, rel=0.15)


def test_an_exchange_by_hand() -> None:
    # EP32 on H100, 128 tokens: 8 copies of each, 24 of 32 ranks elsewhere: 6 x 128 x 7392 bytes at 0.82 x 50 GB/s
    us = exchange_us(GPUS["h100"], 32, 128, 7392, step="dispatch", forwards=False)
    assert us == pytest.approx(20 + 5_677_056 / 41e9 * 1e6, rel=1e-9)


def test_prompts_cross_the_network_once_for_each_machine() -> None:
    _, pairs = copies_sent(GPUS["h100"], 32, forwards=False)
    _, forwarded = copies_sent(GPUS["h100"], 32, forwards=True)
    assert pairs == 6.0
    # 4 machines: a token reaches 4 x (1 - 0.75^8) = 3.6 of them, three quarters of these are others
    assert forwarded == pytest.approx(3.5995 * 0.75, rel=1e-4)


def test_one_rank_sends_nothing() -> None:
    assert exchange_us(GPUS["h200"], 1, 4096, 7392, step="dispatch", forwards=True) == 0.0

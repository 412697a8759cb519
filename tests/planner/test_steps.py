"""Step times: lines through measured points, and what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.model.curves import Curve, Surface
from headrace.planner.model.gpus import GPUS, Gpu
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.kernels import decode_us, experts_us, prefill_us
from headrace.planner.model.measured import measured_points
from headrace.planner.model.roofline import product_us
from headrace.planner.model.step import accepted_tokens, decode_step, prefill_step, slowest_context

GPU_NAMES = st.sampled_from(sorted(GPUS))
RANKS = st.sampled_from([8, 16, 32, 48, 72, 144, 288])
RATES = st.sampled_from(
    ["bytes_per_s", "bf16_flops", "fp8_flops", "nvlink_bytes_per_s", "network_bytes_per_s"]
)


def group_of(gpu: Gpu, ranks: int, drafts: int = 0) -> ExpertGroup:
    weights = gpu.weights
    return ExpertGroup(gpu=gpu, ranks=ranks, weights=weights, linear=weights, drafts=drafts)


def test_a_curve_by_hand() -> None:
    curve = Curve.through([(10.0, 1.0), (20.0, 3.0), (15.0, 0.5), (40.0, 7.0)])
    assert curve.at(5) == 1.0
    assert curve.at(15) == 1.0  # the dip is noise
    assert curve.at(17.5) == 2.0
    assert curve.at(30) == 5.0
    assert curve.at(60) == 7.0
    assert Curve.through([(3.0, 2.0)]).at(99) == 2.0


def test_a_surface_by_hand() -> None:
    surface = Surface.through([(1, 0, 1), (1, 10, 2), (3, 0, 5), (3, 10, 8)])
    assert surface.at(1, 5) == 1.5
    assert surface.at(2, 10) == 5.0
    assert surface.at(9, 20) == 8.0


def test_a_measured_gpu_has_its_tables_times() -> None:
    # rows of the source's tables, in microseconds
    assert decode_us(GPUS["b200"], "fp8", "bf16", 1, 2) == pytest.approx(77.6)
    for table, kv, kernel in (("decode", "fp8", decode_us), ("prefill", "bf16", prefill_us)):
        points = measured_points(table, "gb200", "nvfp4", kv)
        assert len(points) > 100
        below = sum(
            kernel(GPUS["gb200"], "nvfp4", kv, x, y) < us * (1 - 1e-9) for x, y, us in points
        )
        assert below == 0  # lifted where a smaller size took longer, never lowered
        near = [kernel(GPUS["gb200"], "nvfp4", kv, x, y) < us * 1.05 for x, y, us in points]
        assert sum(near) > 0.9 * len(near)


def test_a_gpu_without_a_table_takes_another_ones() -> None:
    h100, h200 = GPUS["h100"], GPUS["h200"]
    # many rows: bound by arithmetic, of which both have the same
    assert experts_us(h100, "fp8", 9, 1e5) == pytest.approx(experts_us(h200, "fp8", 9, 1e5))
    # few: 9 experts are 396 MB, which take 118.3 us at 3.35 TB/s and 82.6 at 4.8
    few = experts_us(h200, "fp8", 9, 8)
    assert few > 82.6
    assert experts_us(h100, "fp8", 9, 8) == pytest.approx(
        min(few * 118.3 / 82.6, few + (118.3 - 82.6) / 0.65), rel=2e-3
    )


def test_a_product_by_hand() -> None:
    # the head in bf16 on H200: 1.853 GB at 65 % of 4.8 TB/s
    assert product_us(GPUS["h200"], 129_280 * 7168, "bf16", 1) == pytest.approx(594, rel=1e-3)


def test_prompts_beyond_the_table_grow_with_their_square() -> None:
    gpu = GPUS["gb200"]
    long, longer = (prefill_us(gpu, "nvfp4", "fp8", 1, n) for n in (131_072, 262_144))
    assert 3 < longer / long < 4
    part = prefill_us(gpu, "nvfp4", "fp8", 0.25, 131_072)
    assert part == pytest.approx(long / 4)


def test_accepted_tokens_by_hand() -> None:
    assert accepted_tokens(0, 0.9) == 1
    assert accepted_tokens(2, 0.5) == 1.75
    assert accepted_tokens(3, 1.0) == 4
    # (1 - alpha^(k+1)) / (1 - alpha)
    assert accepted_tokens(3, 0.85) == pytest.approx(3.19, rel=1e-2)


def test_the_slowest_rank_has_more_context_than_the_mean() -> None:
    assert slowest_context(1000, 0, 64, 32) == 1000
    assert slowest_context(1000, 100, 64, 32) == pytest.approx(1000 + 12.5 * 2.633, rel=1e-3)


def test_a_step_is_its_parts() -> None:
    step = decode_step(group_of(GPUS["h200"], 8), 64, 4096, overlap=False)
    layer = step.layer
    in_turn = layer.attention + layer.experts + layer.glue + layer.combine
    in_turn += max(layer.dispatch, layer.shared)
    assert step.experts_ms == pytest.approx(58 * in_turn / 1e3)
    parts = step.experts_ms + step.dense_ms + step.head_ms + step.drafts_ms + step.gap_ms
    assert step.ms == pytest.approx(parts)
    assert step.drafts_ms == 0


def test_the_engine_takes_the_quicker_way() -> None:
    group = group_of(GPUS["h100"], 72)
    ways = [decode_step(group, 256, 2000, overlap=way).ms for way in (False, True)]
    assert decode_step(group, 256, 2000).ms == min(ways)


@settings(max_examples=60, deadline=None)
@given(GPU_NAMES, RANKS, st.integers(1, 1500), st.integers(16, 60_000), st.integers(0, 3))
def test_more_work_never_takes_less_time(
    name: str, ranks: int, rows: int, context: int, drafts: int
) -> None:
    group = group_of(GPUS[name], ranks, drafts)
    ms = decode_step(group, rows, context).ms
    assert decode_step(group, rows + 16, context).ms >= ms * (1 - 1e-9)
    assert decode_step(group, rows, context * 1.5).ms >= ms * (1 - 1e-9)
    assert decode_step(group, rows, context, spread=100).ms >= ms * (1 - 1e-9)
    assert decode_step(replace(group, drafts=drafts + 1), rows, context).ms > ms


@settings(max_examples=60, deadline=None)
@given(GPU_NAMES, RANKS, RATES, st.integers(1, 1500), st.integers(16, 60_000))
def test_a_faster_machine_is_never_slower(
    name: str, ranks: int, rate: str, rows: int, context: int
) -> None:
    gpu = GPUS[name]
    faster = replace(gpu, **{rate: 1.5 * getattr(gpu, rate)})
    for step in (
        lambda g: decode_step(g, rows, context).ms,
        lambda g: prefill_step(g, 8192, context).ms,
    ):
        assert step(group_of(faster, ranks)) <= step(group_of(gpu, ranks)) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(GPU_NAMES, RANKS, st.integers(256, 16_384), st.integers(64, 30_000), st.integers(1, 30_000))
def test_prompts_cost_more_with_more_behind_them(
    name: str, ranks: int, tokens: int, prompt: int, cached: int
) -> None:
    group = group_of(GPUS[name], ranks)
    ms = prefill_step(group, tokens, prompt).ms
    assert prefill_step(group, tokens, prompt, cached=cached).ms >= ms
    assert prefill_step(group, 2 * tokens, prompt).ms >= ms


def test_attention_is_read_from_the_table_of_its_cache() -> None:
    gpu = GPUS["h200"]
    assert decode_us(gpu, "fp8", "fp8", 64, 8192) != decode_us(gpu, "fp8", "bf16", 64, 8192)

"""Least times of operations, from their bytes and their arithmetic. Microseconds."""

from __future__ import annotations

from headrace.planner.model import shape
from headrace.planner.model.assumptions import ROOF_SHARE
from headrace.planner.model.gpus import Gpu


def product_floor_us(gpu: Gpu, parameters: float, weights: str, rows: float) -> float:
    """A matrix product reads its weights, or is bound by its arithmetic."""
    if weights == "bf16":
        size, flops = float(shape.BF16), gpu.bf16_flops
    else:
        size, flops = shape.WEIGHT_BYTES[weights], gpu.flops(weights)
    return max(parameters * size / gpu.bytes_per_s, 2 * parameters * rows / flops) * 1e6


def product_us(gpu: Gpu, parameters: float, weights: str, rows: float) -> float:
    """What a matrix product takes of which no kernel was measured."""
    return product_floor_us(gpu, parameters, weights, rows) / ROOF_SHARE


def _projections_floor_us(gpu: Gpu, rows: float) -> float:
    linear = product_floor_us(gpu, shape.PROJECTIONS, "fp8", rows)
    return linear + product_floor_us(gpu, shape.ABSORBED, "bf16", rows)


def decode_floor_us(gpu: Gpu, kv: str, sequences: float, context: float) -> float:
    """Attention of a layer with its projections, one new token for each sequence."""
    positions = sequences * context
    read = positions * shape.KV_VALUES * shape.KV_BYTES[kv] / gpu.bytes_per_s
    arithmetic = positions * shape.LATENT_PAIR_FLOPS / gpu.bf16_flops
    return _projections_floor_us(gpu, sequences) + max(read, arithmetic) * 1e6


def prefill_floor_us(gpu: Gpu, prompts: float, tokens: float) -> float:
    """Attention of a layer with its projections, over whole prompts."""
    pairs = prompts * tokens * (tokens + 1) / 2
    arithmetic = pairs * shape.PAIR_FLOPS / gpu.bf16_flops * 1e6
    return _projections_floor_us(gpu, prompts * tokens) + arithmetic


def experts_floor_us(gpu: Gpu, weights: str, slots: float, rows: float) -> float:
    """A layer's experts on one rank: all weights are read once."""
    read = slots * shape.expert_bytes(weights) / gpu.bytes_per_s
    return max(read, 2 * shape.EXPERT * rows / gpu.flops(weights)) * 1e6

"""What measured kernels take on a GPU, within the measured sizes and beyond.

A kernel keeps the share of the roof that was measured: on a GPU without a table of its own, which takes the table of
another, and for sizes beyond the table. More work never takes less time, and a faster GPU never takes more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from headrace.planner.model.assumptions import ROOF_SHARE
from headrace.planner.model.curves import Surface
from headrace.planner.model.gpus import GPUS, Gpu
from headrace.planner.model.measured import MeasuredPoint, measured_points
from headrace.planner.model.roofline import decode_floor_us, experts_floor_us, prefill_floor_us

Floor = Callable[[Gpu, float, float], float]

# The GPUs that the tables were measured on, by the tables' names.
MEASURED = {GPUS[name].measured: GPUS[name] for name in ("h200", "b200", "gb200", "gb300")}
# Sizes beyond the tables: far enough for each group and request that can be planned.
MORE_SEQUENCES = (2048, 4096, 16_384, 65_536)
LONGER_CONTEXTS = tuple(1 << n for n in range(8, 20))
LONGER_PROMPTS = tuple(base << n for n in range(9, 18) for base in (2, 3))
MORE_EXPERTS = (192, 256, 288)
MORE_ROWS = tuple(1 << n for n in range(6, 24))


def decode_us(gpu: Gpu, weights: str, kv: str, sequences: float, context: float) -> float:
    """Attention of a layer with its projections, one new token for each sequence."""
    return _decode(gpu, weights, kv).at(sequences, context)


def prefill_us(gpu: Gpu, weights: str, kv: str, prompts: float, tokens: float) -> float:
    """Attention of a layer with its projections; part of a prompt takes its part of the time."""
    return _prefill(gpu, weights, kv).at(max(prompts, 1.0), tokens) * min(prompts, 1.0)


def experts_us(gpu: Gpu, weights: str, slots: float, rows: float) -> float:
    """A layer's experts on one rank."""
    return _experts(gpu, weights).at(slots, rows)


@functools.lru_cache(maxsize=256)
def _decode(gpu: Gpu, weights: str, kv: str) -> Surface:
    def floor(one: Gpu, sequences: float, context: float) -> float:
        return decode_floor_us(one, kv, sequences, context)

    points = measured_points("decode", gpu.measured, weights, kv)
    return _surface(points, MORE_SEQUENCES, LONGER_CONTEXTS, floor, MEASURED[gpu.measured], gpu)


@functools.lru_cache(maxsize=256)
def _prefill(gpu: Gpu, weights: str, kv: str) -> Surface:
    points = measured_points("prefill", gpu.measured, weights, kv)
    source = MEASURED[gpu.measured]
    return _surface(points, MORE_SEQUENCES, LONGER_PROMPTS, prefill_floor_us, source, gpu)


@functools.lru_cache(maxsize=256)
def _experts(gpu: Gpu, weights: str) -> Surface:
    def floor(one: Gpu, slots: float, rows: float) -> float:
        return experts_floor_us(one, weights, slots, rows)

    points, source = measured_points("experts", gpu.measured, weights), MEASURED[gpu.measured]
    if not points:  # fp8 was measured on H200 alone
        source = GPUS["h200"]
        points = measured_points("experts", source.measured, weights)
    return _surface(points, MORE_EXPERTS, MORE_ROWS, floor, source, gpu)


def _surface(
    points: Sequence[MeasuredPoint],
    more_xs: Sequence[float],
    more_ys: Sequence[float],
    floor: Floor,
    source: Gpu,
    gpu: Gpu,
) -> Surface:
    wider = _beyond(points, more_ys, lambda x, y: floor(source, x, y))
    turned = _beyond([(y, x, us) for x, y, us in wider], more_xs, lambda y, x: floor(source, x, y))
    return Surface.through(
        (x, y, _on(us, floor(source, x, y), floor(gpu, x, y))) for y, x, us in turned
    )


def _on(us: float, source_floor: float, floor: float) -> float:
    """A kernel's time where its floor is another one.

    It keeps its share of the roof. Where the floor is higher it may take less, since slower memory does not make the
    start of a kernel longer: then what is added reaches the share of a plain product.
    """
    same_share = us * floor / source_floor
    if floor <= source_floor:
        return same_share
    return min(same_share, us + (floor - source_floor) / ROOF_SHARE)


def _beyond(
    points: Sequence[MeasuredPoint], more: Sequence[float], floor: Callable[[float, float], float]
) -> list[MeasuredPoint]:
    """The points, and for each `x` some behind its largest `y`, at that point's share of the roof."""
    last: dict[float, tuple[float, float]] = {}
    for x, y, us in points:
        last[x] = max(last.get(x, (y, us)), (y, us))
    further = (
        (x, y, us * floor(x, y) / floor(x, largest))
        for x, (largest, us) in last.items()
        for y in more
        if y > largest
    )
    return [*points, *further]

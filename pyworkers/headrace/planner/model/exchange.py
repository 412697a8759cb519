"""Rows on their way between ranks: bytes of a dispatch and of a combine, and how long they take."""

from __future__ import annotations

from headrace.planner.model.assumptions import LINK_SHARE, NETWORK_FLOOR_US, NVLINK_FLOOR_US
from headrace.planner.model.gpus import Gpu
from headrace.planner.model.shape import BF16, HIDDEN, ROUTING_GROUPS, TOP_K

# A row in fp8 has a float32 scale for each 128 values, one in nvfp4 a byte for each 16.
DISPATCH_ROW_BYTES = {"fp8": HIDDEN + 4 * HIDDEN // 128, "nvfp4": HIDDEN // 2 + HIDDEN // 16}
COMBINE_ROW_BYTES = BF16 * HIDDEN


def reached(places: int, choices: int = TOP_K) -> float:
    """Places that a token reaches on average with so many choices among them."""
    return places * (1 - (1 - 1 / places) ** choices)


def copies_sent(gpu: Gpu, ranks: int, *, forwards: bool) -> tuple[float, float]:
    """Copies of one token that leave its rank over NVLink and over the network.

    Within one NVLink domain a rank gets a token once. Beyond, decode sends a token once for each expert; prefill
    `forwards`: a token goes once to each domain, and there by NVLink to its ranks.
    """
    near = min(ranks, gpu.nvlink_gpus)
    if near == ranks:
        return reached(ranks) * (ranks - 1) / ranks, 0.0
    if not forwards:
        return TOP_K * (near - 1) / ranks, TOP_K * (ranks - near) / ranks
    domains = -(-ranks // near)
    entered = min(reached(domains), ROUTING_GROUPS)
    return reached(ranks) * (near - 1) / near, entered * (domains - 1) / domains


def exchange_us(
    gpu: Gpu, ranks: int, tokens: float, row_bytes: int, *, step: str, forwards: bool
) -> float:
    """One way, for `tokens` on each rank. `step` is dispatch or combine; both links work at once."""
    if ranks == 1:
        return 0.0
    near, far = copies_sent(gpu, ranks, forwards=forwards)
    floor = NETWORK_FLOOR_US[step] if far else NVLINK_FLOOR_US[step]
    seconds = max(near / gpu.nvlink_bytes_per_s, far / gpu.network_bytes_per_s)
    return floor + tokens * row_bytes * seconds / LINK_SHARE * 1e6

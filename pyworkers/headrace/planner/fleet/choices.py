"""What may be chosen from, what of it fits, and the search for the fewest groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.planner.errors import DoesNotFit
from headrace.planner.fleet.options import EP_SIZES, MOST_DRAFTS, groups_of
from headrace.planner.model.group import ExpertGroup

MOST_GPUS = 8192  # of a pool: more are not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What may be chosen from."""

    base: ExpertGroup
    acceptance: float  # chance that a draft is right if those before it are
    prefill_sizes: tuple[int, ...] = EP_SIZES
    decode_sizes: tuple[int, ...] = EP_SIZES
    drafts: tuple[int, ...] = tuple(range(MOST_DRAFTS + 1))


def fitting(base: ExpertGroup, sizes: tuple[int, ...], longest: int) -> list[ExpertGroup]:
    """Those whose ranks hold the model and the KV of the longest request."""
    asked = list(groups_of(base, sizes))
    found = [group for group in asked if group.kv_tokens >= longest]
    if not found:
        largest = asked[-1]
        memory = largest.gpu.memory_bytes / 1e9
        listed = ", ".join(f"EP{group.ranks}" for group in asked)
        enough = [group for group in groups_of(base, EP_SIZES) if group.kv_tokens >= longest]
        instead = f"; EP{enough[0].ranks} is enough" if enough else ""
        raise DoesNotFit(
            f"DeepSeek-R1 does not fit {base.gpu.name} with {listed}: at EP{largest.ranks} weights take "
            f"{largest.weight_bytes / 1e9:.0f} of {memory:.0f} GB, which leaves KV of "
            f"{max(largest.kv_tokens, 0)} tokens for a request of {longest}{instead}"
        )
    return found


def fewest(
    reached: Callable[[int], tuple[float, list[float]]], limit: float, least: int, most: int
) -> tuple[int, float, list[float]] | None:
    """The smallest number of groups that keeps the limit, with what it reaches. None: `most` are too few."""
    low, high = max(least, 1), max(least, 1)
    if low > most:
        return None
    found = reached(high)
    while found[0] > limit:
        if high == most:
            return None
        low, high = high + 1, min(2 * high, most)
        found = reached(high)
    while low < high:
        middle = (low + high) // 2
        tried = reached(middle)
        if tried[0] <= limit:
            high, found = middle, tried
        else:
            low = middle + 1
    return high, *found


def too_many(what: str, gpus: float) -> str:
    return f"the {what} need more than {max(MOST_GPUS, round(gpus))} GPUs; slow the trace down with --speed"

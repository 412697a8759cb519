"""How many rows the busiest rank of a group gets: popular experts, their copies, and chance."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Sequence

from headrace.planner.model.assumptions import BALANCED_EXCESS
from headrace.planner.model.shape import EXPERTS

ExpertLoads = tuple[tuple[float, ...], ...]
"""Of each layer, the share of its rows that each expert gets."""

# The load of an expert falls as its place in the order of loads to this power: so that 32 ranks without rebalancing are
# as uneven as measured (`UNBALANCED_EXCESS`).
EXPONENT = 0.62
LAYERS_DRAWN = 8
REDUNDANT = 32  # copies of experts in a group, as DeepSeek has them


@functools.cache
def drawn_loads(exponent: float = EXPONENT) -> ExpertLoads:
    """Zipf's loads, in an order of their own for each layer."""
    weights = [(place + 1) ** -exponent for place in range(EXPERTS)]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    return tuple(
        tuple(random.Random(layer).sample(shares, EXPERTS)) for layer in range(LAYERS_DRAWN)
    )


def slots_of(ranks: int, redundant: int = REDUNDANT) -> int:
    """Experts on each rank, copies included."""
    return -(-(EXPERTS + redundant) // ranks)


def replicated(shares: Sequence[float], copies: int) -> list[float]:
    """Loads of all copies: each further one goes to the expert whose copies are busiest."""
    counts = [1] * len(shares)
    busiest = [(-share, expert) for expert, share in enumerate(shares)]
    heapq.heapify(busiest)
    for _ in range(copies - len(shares)):
        expert = busiest[0][1]
        counts[expert] += 1
        heapq.heapreplace(busiest, (-shares[expert] / counts[expert], expert))
    return [share / n for share, n in zip(shares, counts, strict=True) for _ in range(n)]


def packed(loads: Sequence[float], ranks: int) -> list[float]:
    """Load of each rank: the heaviest first, each to the lightest rank that has a slot."""
    room = len(loads) // ranks
    lightest = [(0.0, rank, 0) for rank in range(ranks)]
    heapq.heapify(lightest)
    full: list[float] = []
    for load in sorted(loads, reverse=True):
        held, rank, used = heapq.heappop(lightest)
        if used + 1 == room:
            full.append(held + load)
        else:
            heapq.heappush(lightest, (held + load, rank, used + 1))
    return full


@functools.cache
def unbalanced(ranks: int, loads: ExpertLoads) -> float:
    """Busiest rank over the mean where experts lie in the order of their numbers; the mean over layers."""
    bounds = [round(rank * EXPERTS / ranks) for rank in range(ranks + 1)]
    busiest = (max(sum(of[a:b]) for a, b in itertools.pairwise(bounds)) for of in loads)
    return sum(busiest) / len(loads) * ranks


@functools.cache
def balanced(ranks: int, redundant: int, loads: ExpertLoads) -> float:
    """Busiest rank over the mean with experts and copies spread by load, and with what changes meanwhile."""
    copies = ranks * slots_of(ranks, redundant)
    busiest = (max(packed(replicated(of, copies), ranks)) for of in loads)
    return sum(busiest) / len(loads) * ranks + BALANCED_EXCESS


def busiest_rows(mean_rows: float, ranks: int, imbalance: float) -> float:
    """Rows of the busiest rank: the mean times `imbalance`, and what the largest of `ranks` draws adds by chance."""
    return imbalance * mean_rows + math.sqrt(2 * math.log(ranks) * mean_rows)

"""Whether moving the experts of a layer pays: seconds that steps wait less, against seconds that the moves take.

Everything is from what was measured, alike on all ranks, and pure: the same figures give the same answer everywhere.

A step waits for the busiest rank in each layer, so a window of steps would have been shorter by the rows that the
busiest rank has less, times the seconds that a rank takes for one row more. These seconds are the slope of what ranks
took over the rows that they had: what a layer costs however its rows lie is not in it, and where experts are so idle
that their weights set the time it is zero.

Loads drift, and a placement that suits the newest window may suit none to come. So what a change would have saved in
the worst of the last windows counts, and less of it with each window ahead. The part of one window's unevenness that
was still there in the next one is `persistence` p; what a placement saves fades sooner, and is taken for p * p of it in
the next window, p ** 4 in the one after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace_kernels.moe.balance import GroupShape, Loads, Stay, balanced_slots
from headrace_kernels.moe.moves import Wave, busiest, plan_waves
from headrace_kernels.moe.placement import LayerPlacement

WINDOWS = 4  # that a change has to be good for; fewer, and none is made. A guess
KEPT = 0.5  # of each window's weight is that of the window before, where a placement is chosen. A guess
MARGIN = 2.0  # the best of several predictions is too good by some of their errors. A guess, tried in tests
MOST_PERSISTENCE = 1 - 1 / 32  # some 16 windows are looked ahead at most; a guess
# Placements that are weighed: all anew, and those where experts stay up to so much above the mean. Guesses.
TOLERANCES = (None, -0.1, 0.0, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What was measured."""

    seconds_per_row: float  # of a rank, for one more row of an expert
    seconds_per_byte: float  # between two steps, from a slot of one rank into one of another
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One layer: what the best change would give, and what it costs."""

    gain_s: float
    window_s: float  # of that, in one window like the last ones
    cost_s: float
    before: float  # (greatest - mean) / mean of the rows of ranks
    after: float
    waves: Sequence[Wave] = ()

    @property
    def pays(self) -> bool:
        return self.gain_s > MARGIN * self.cost_s


def rows_of_ranks(counts: Loads, placement: LayerPlacement) -> NDArray[np.float64]:
    """Rows that come to each rank, `[ranks]`, of the `counts` `[ranks, experts]` that ranks send."""
    ranks = len(placement.ranks)
    copies = np.zeros(placement.experts, np.int64)
    for held in placement.ranks:
        copies[list(held)] += 1
    holders = np.zeros((placement.experts, int(copies.max())), np.int64)
    holds = np.zeros((ranks, placement.experts), bool)
    seen = np.zeros_like(copies)
    for rank, held in enumerate(placement.ranks):
        mine = list(held)
        holders[mine, seen[mine]] = rank
        seen[mine] += 1
        holds[rank, mine] = True
    # The same choice as `LayerPlacement.replicas_for` makes.
    sender = np.arange(ranks)[:, None]
    to = np.where(holds, sender, holders[np.arange(placement.experts), sender % copies])
    rows = np.zeros(ranks)
    np.add.at(rows, to, counts)
    return rows


def seconds_per_row(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """The slope of `seconds` over `rows`, `[layers, ranks]` each, every layer around its own mean.

    It is 0 at least, and at most what all rows took on average: where ranks have nearly as many rows, noise is steeper.
    """
    x = rows - rows.mean(1, keepdims=True)
    y = seconds - seconds.mean(1, keepdims=True)
    spread, all_rows = float((x * x).sum()), float(rows.sum())
    if spread == 0 or all_rows == 0:
        return 0.0
    return max(0.0, min(float((x * y).sum()) / spread, float(seconds.sum()) / all_rows))


def persistence(windows: Loads) -> float:
    """The part of the unevenness of a window that the next one still has, at the worst; from 0 to nearly 1.

    `windows` is `[windows, layers, experts]`, the oldest first.
    """
    uneven = _unevenness(windows)
    parts = [
        float((now * then).sum()) / spread if (spread := float((now * now).sum())) else 0.0
        for now, then in pairwise(uneven)
    ]
    return min(MOST_PERSISTENCE, max(0.0, min(parts, default=0.0)))


def _unevenness(loads: Loads) -> Loads:
    mean = loads.mean(-1, keepdims=True)
    return np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0) - 1


def weigh(
    windows: Loads,
    placement: LayerPlacement,
    shape: GroupShape,
    *,
    persistence: float,
    prices: Prices,
) -> Verdict:
    """The change of one layer that is worth most, or none. `windows` is `[windows, ranks, experts]`, oldest first."""
    now = [rows_of_ranks(window, placement) for window in windows]
    uneven = _above_mean(now[-1])
    best = Verdict(gain_s=0.0, window_s=0.0, cost_s=0.0, before=uneven, after=uneven)
    ahead = persistence**2 / (
        1 - persistence**2
    )  # windows, each counted as far as it is like these
    row_s = prices.seconds_per_row * ahead
    if len(windows) < WINDOWS or row_s == 0 or uneven == 0:
        return best
    weights = KEPT ** np.arange(len(windows))[::-1]
    loads = np.tensordot(weights, windows.sum(1), 1)[None]  # [1, experts]
    current = np.array([placement.ranks])
    for tolerance in TOLERANCES:
        stay = None if tolerance is None else Stay(slots=current, tolerance=tolerance)
        held = balanced_slots(loads, shape, stay)[0].tolist()
        target = LayerPlacement(placement.experts, tuple(map(tuple, held)))
        then = [rows_of_ranks(window, target) for window in windows]
        saved = min(float(a.max() - b.max()) for a, b in zip(now, then, strict=True))
        if saved * row_s <= best.gain_s - best.cost_s:
            continue
        waves = plan_waves(placement, target.ranks)
        found = Verdict(
            gain_s=saved * row_s,
            window_s=saved * prices.seconds_per_row,
            cost_s=busiest(waves) * prices.slot_bytes * prices.seconds_per_byte,
            before=uneven,
            after=_above_mean(then[-1]),
            waves=waves,
        )
        if not best.waves or found.gain_s - found.cost_s > best.gain_s - best.cost_s:
            best = found
    return best


def _above_mean(rows: NDArray[np.float64]) -> float:
    mean = float(rows.mean())
    return float(rows.max() - mean) / mean if mean > 0 else 0.0

"""What a sampler should draw, by the textbook, and how far what it drew is from that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.wire.frames import Sampling


def cut(p: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Sort, cut by top-k, top-p and min-p, normalise."""
    order = np.argsort(-p, kind="stable")
    kept = p[order].copy()
    if sampling.top_k:
        kept[sampling.top_k :] = 0
    before = np.cumsum(kept) - kept
    kept[before >= sampling.top_p * kept.sum()] = 0
    kept[kept < sampling.min_p * kept.max()] = 0
    out = np.zeros_like(p)
    out[order] = kept / kept.sum()
    return out


def chi_squared(counts: NDArray[np.int64], p: NDArray[np.float64], draws: int) -> float:
    """Standard deviations by which chi-squared is above its mean; what is rare is put together."""
    assert (counts[p == 0] == 0).all(), "a token that was cut came up"
    common = p * draws >= 10
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(p[common], p[~common].sum()) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 0.0
    degrees = len(wanted) - 1
    return float((((observed - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees))

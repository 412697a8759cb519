"""Rows that belong together, laid out one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`first[i], first[i] + 1, ...`, `counts[i]` of them, one after the other for all `i`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - counts), counts) + np.arange(total, dtype=np.int64)

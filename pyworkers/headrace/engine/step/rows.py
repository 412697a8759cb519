"""Rows that belong together, laid out one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# What each step calls is called as a method of the array: numpy wraps the functions in Python, and where the weights of
# a model have just gone through the caches, how much code runs is what a lone step costs beside them.


def places_of(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where a mask of one dimension is true."""
    return mask.nonzero()[0]


def spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`first[i], first[i] + 1, ...`, `counts[i]` of them, one after the other for all `i`."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return (first - (ends - counts)).repeat(counts) + np.arange(total, dtype=np.int64)

"""The only source of randomness: noise = f(seed, position, token).

A counter hash, so there is no state to carry: a sequence that was preempted, moved to another worker or drafted ahead
draws what it would have drawn. All machines compute the same 31 bits.

Choosing the token with the least `exponential(bits) / weight` draws a token with probability proportional to its
weight: the exponential race, the same thing as adding Gumbel noise to the logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace import _core

NOISE_BITS = 31
MULTIPLY_1 = 0x21F0AAAD  # with the shifts below: the mixer found by C. Wellons and TheIronBorn ("prospecting for hash
MULTIPLY_2 = (
    0xD35A2D97  # functions", bias 0.107 of 1000), the second half of the key added in the middle
)


def keys(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Two key words for each (seed, position). A position counts from the start of the prompt."""
    return _core.noise_keys(seeds, positions)


def bits(
    tokens: NDArray[np.uint32],
    key: NDArray[np.uint32] | np.uint32,
    key2: NDArray[np.uint32] | np.uint32,
) -> NDArray[np.uint32]:
    """31 noise bits for each token; the key words broadcast."""
    x = tokens ^ key
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(MULTIPLY_1)
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x += key2
    x *= np.uint32(MULTIPLY_2)
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x &= np.uint32(0x7FFFFFFF)
    return x


def exponential(noise: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Noise bits as a draw from the exponential distribution. Never 0, never infinite."""
    return -np.log1p(-(noise + 0.5) * 2.0**-NOISE_BITS)

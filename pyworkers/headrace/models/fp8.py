"""FP8 weights of DeepSeek: e4m3 values in blocks of 128 x 128, each block with one float32 scale.

`w = value * scale_inv` of its block; despite its name the stored number is the multiplier. The last block of a row or
column may be partial. Leading dimensions, such as that of the experts, have scales of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace_kernels.ops import HostArray

__all__ = ["BLOCK", "SCALE_SUFFIX", "Scaled", "dequantise", "scale_shape"]

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"  # after the name of the weight


class Scaled(NamedTuple):
    """A quantised weight as it is stored: e4m3 `[..., out, in]` and float32 `[..., out / 128, in / 128]`."""

    weight: HostArray
    scale_inv: HostArray


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a weight of this shape."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // BLOCK), -(-columns // BLOCK))


def dequantise(scaled: Scaled, first_row: int = 0) -> HostArray:
    """The weight in float32. `weight` may be a part of what the scales are for, from that row on."""
    rows, columns = scaled.weight.shape[-2:]
    scales = scaled.scale_inv[..., np.arange(columns) // BLOCK]
    result = scaled.weight.astype(np.float32)
    for block in range(first_row // BLOCK, -(-(first_row + rows) // BLOCK)):
        start = max(block * BLOCK - first_row, 0)
        stop = min((block + 1) * BLOCK - first_row, rows)
        result[..., start:stop, :] *= scales[..., block, None, :]
    return result

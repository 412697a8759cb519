"""Which part of a product a program computes.

A row must have the same bits in every batch. They follow from the order of the sums along the columns, which is that of
the weight's shape alone (`parts.py`), and from how the GPU adds up within an instruction. So tiles of many rows may be
larger than those of few: what they add, and in which order, is the same. The tests compare the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

NEAR: tl.constexpr = tl.constexpr(8)  # tiles of rows whose programs run at about one time


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one program; `warps` and `stages` are Triton's."""

    rows: int
    outs: int
    columns: int  # of one step along them
    warps: int = 4
    stages: int = 3

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@triton.jit
def near_tiles(
    program, rows, n_out, ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr
) -> tuple[Any, Any]:
    """The tiles of rows and of outputs of a program. Programs that run at one time read few rows and few weights.

    Some tiles of rows go through all outputs before the next ones do: one after the other, each would read all weights
    from memory again, where those are more than the L2 keeps.
    """
    band = NEAR * tl.cdiv(n_out, OUT_TILE)  # programs
    first = program // band * NEAR  # tile of rows
    height = tl.minimum(tl.cdiv(rows, ROWS_TILE) - first, NEAR)
    within = program % band
    return first + within % height, within // height

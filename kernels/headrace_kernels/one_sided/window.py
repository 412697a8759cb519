"""What other ranks write into a rank's memory: one buffer, laid out alike on all ranks.

flags     [2, ranks]                  int64; epoch * 2**20 + count, by the rank that wrote: of rows, of results
x         [ranks, most_rows, x_words]      rows that come, in 32-bit words; a slice for each rank that sends
scale     [ranks, most_rows, scale_words]  their scales where they are e4m3
slots     [ranks, most_rows, top_k]   int32; of this rank, -1 where another one has the expert
weights   [ranks, most_rows, top_k]   float32
rows      [ranks, most_rows]          int32; which row of its rank it is
columns   [ranks, most_rows]          int32; how many ranks before this one the row goes to
results   [most_rows, answers, result_words]  what comes back for this rank's own rows

Only rank r writes into slice r. A slice is written again only after this rank has returned the results of the layer
before to all: so one buffer is enough for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace_kernels.dense.fp8_quantise import BLOCK
from headrace_kernels.moe.dispatch import Combine

WORD = 4
COUNT_BITS = 20  # of a flag; above them is the epoch
ALIGN = 128  # bytes; the widest that a GPU reads at once


class Part(NamedTuple):
    """Where a part is in the buffer, in bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The sizes that decide the layout. All ranks have the same."""

    ranks: int
    most_rows: int  # of one rank in one layer
    hidden: int
    top_k: int
    combine: Combine
    dtype: torch.dtype  # of results, and of rows that are not e4m3
    e4m3: bool = False  # rows travel as e4m3 with a float32 scale for each 128 values

    def __post_init__(self) -> None:
        if self.hidden * self.row_dtype.itemsize % WORD or self.hidden * self.dtype.itemsize % WORD:
            raise ValueError(f"rows of {self.hidden} values are not whole words of {WORD} bytes")
        if min(self.ranks, self.most_rows, self.hidden, self.top_k) < 1:
            raise ValueError("a window has a rank, a row, a value and an expert at least")
        if self.most_rows >= 1 << COUNT_BITS:
            raise ValueError(
                f"{self.most_rows} rows of a rank, flags count less than {1 << COUNT_BITS}"
            )

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.e4m3 else self.dtype

    @property
    def x_words(self) -> int:
        return self.hidden * self.row_dtype.itemsize // WORD

    @property
    def scale_words(self) -> int:
        return -(-self.hidden // BLOCK) if self.e4m3 else 0

    @property
    def result_words(self) -> int:
        return self.hidden * self.dtype.itemsize // WORD

    @property
    def answers(self) -> int:
        """Results of a row at most."""
        return self.top_k if self.combine == "exact" else min(self.top_k, self.ranks)

    @property
    def parts(self) -> dict[str, Part]:
        rows = self.ranks * self.most_rows
        sizes = {
            "flags": 2 * self.ranks * 8,
            "x": rows * self.x_words * WORD,
            "scale": rows * self.scale_words * WORD,
            "slots": rows * self.top_k * WORD,
            "weights": rows * self.top_k * WORD,
            "rows": rows * WORD,
            "columns": rows * WORD,
            "results": self.most_rows * self.answers * self.result_words * WORD,
        }
        parts: dict[str, Part] = {}
        offset = 0
        for name, nbytes in sizes.items():
            parts[name] = Part(offset, nbytes)
            offset += -(-nbytes // ALIGN) * ALIGN
        return parts

    @property
    def nbytes(self) -> int:
        last = self.parts["results"]
        return last.offset + last.nbytes

    def view(
        self, buffer: torch.Tensor, name: str, dtype: torch.dtype, *shape: int
    ) -> torch.Tensor:
        """A part of this rank's own buffer."""
        offset, nbytes = self.parts[name]
        return buffer[offset : offset + nbytes].view(dtype).view(shape)

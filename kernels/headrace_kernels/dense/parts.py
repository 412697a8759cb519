"""Into how many parts a product cuts its columns, so that few rows fill a GPU and every row keeps its bits.

A decode step has one tile of rows. DeepSeek-R1's router, 256 outputs of 7,168 inputs, would then be a handful of
programs on 132 multiprocessors, each of which walks all columns: 700 us on an H100. Cut into parts, each part is a
program of its own, and `sum_parts` adds them up. With many rows there are programs enough, and one walks all parts.

Both ways give the same bits: a part is summed from zero, the parts are added from zero in their order, and how they
are cut follows from the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_kernels.dense.tiles import Tile

PROGRAMS = (
    256  # that one tile of rows becomes, about: two for each multiprocessor of an H100; not tuned
)
LEAST_STEPS = (
    4  # along the columns, of a part: fewer would not hide how a program starts; not tuned
)
MOST_PROGRAMS = 2048  # of a product that is split, and so a bound on the memory of its sums


@dataclass(frozen=True, slots=True)
class Parts:
    """The columns of a product, in steps of one tile."""

    count: int
    steps: int  # of each; the last part may have fewer

    def split(self, tiles: int) -> bool:
        """Whether each part of so many tiles is a program of its own."""
        return self.count > 1 and tiles * self.count <= MOST_PROGRAMS


def parts_of(out_tiles: int, steps: int) -> Parts:
    """How a product of so many tiles of outputs, and steps along the columns, is cut."""
    count = max(1, min(PROGRAMS // max(out_tiles, 1), steps // LEAST_STEPS))
    each = -(-steps // count)
    return Parts(-(-steps // max(each, 1)), each)


def part_bytes(rows: int, n_out: int, n_in: int, tile: Tile) -> int:
    """The most that sums of parts take in a product of up to so many rows."""
    out_tiles = -(-n_out // tile.outs)
    parts = parts_of(out_tiles, -(-n_in // tile.columns))
    if parts.count < 2 or not n_out:
        return 0
    row_tiles = min(-(-rows // tile.rows), MOST_PROGRAMS // (out_tiles * parts.count))
    return 4 * parts.count * min(rows, row_tiles * tile.rows) * n_out

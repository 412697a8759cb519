"""Which spans of keys the rows of a step see: the work list of attention that is summed span by span.

A program attends with a tile of rows over one span, and a merge sums the spans of each row (merge_spans.py). Only pairs
of tile and span that exist are listed, so one long context costs the rows beside it neither memory nor programs. Spans
wait to be merged in a buffer; tiles take turns where those of all would need more than PART_BYTES. None of this changes
a bit of the result: spans are cut at fixed positions and merged in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from headrace_kernels.upload import upload

# Of spans that wait to be merged; a tile that alone has more gets what it needs.
PART_BYTES = 1 << 29
# Works of a step of answers are a multiple of it, so that steps whose contexts grow have the form of others.
WORKS = 32
BEYOND = 1 << 19  # a span after all keys: who works on it sees nothing


@dataclass(frozen=True, slots=True)
class SpanLaunch:
    """Tiles that are worked on together."""

    works: range  # places in `SpanPlan.works`
    rows: range
    parts: int  # rows of the buffer: a row has one for each span that its tile sees


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Made once for all layers of a step."""

    launches: list[SpanLaunch]
    works: torch.Tensor  # [3, works] int32: tile, span, place of the tile's first row in the buffer
    # [3, rows] int32: place of the first span in the buffer, step to the next, spans.
    rows: torch.Tensor


def span_plan(
    row_counts: ArrayLike,
    contexts: ArrayLike,
    *,
    span: int,
    width: int,
    device: torch.device,
    padded: bool = False,
) -> SpanPlan:
    """For tiles of rows that follow one another. `contexts` are what the newest row of each tile sees.

    `span` is in tokens; `width` are the floats of a row in the buffer. A `padded` plan is of tiles of one row, and has
    works more than there are: they see nothing, and write to a place of the buffer that no row has.
    """
    counts = np.asarray(row_counts, dtype=np.int64)
    spans = -(-np.asarray(contexts, dtype=np.int64) // span)
    works_before = _before(spans)
    rows_before = _before(counts)
    parts_before = _before(counts * spans)
    most = max(1, PART_BYTES // (4 * width))
    tiles = len(counts)
    first_part = np.zeros(tiles, dtype=np.int64)  # of the launch that a tile is in
    launches: list[SpanLaunch] = []
    start = 0
    while start < tiles:
        room = parts_before[start] + most
        stop = int(np.searchsorted(parts_before, room, side="right")) - 1
        stop = min(max(stop, start + 1), tiles)
        first_part[start:stop] = parts_before[start]
        launches.append(
            SpanLaunch(
                range(int(works_before[start]), int(works_before[stop])),
                range(int(rows_before[start]), int(rows_before[stop])),
                int(parts_before[stop] - parts_before[start]),
            )
        )
        start = stop
    tile = np.arange(tiles).repeat(spans)
    at = parts_before[:-1] - first_part
    of_span = np.arange(len(tile)) - works_before[tile]
    works = np.stack((tile, of_span, at[tile] + of_span * counts[tile]))
    if padded and len(launches) == 1 and (more := -len(tile) % WORKS):
        assert (counts == 1).all(), "each work has one place in the buffer"
        works = np.hstack((works, np.tile([[0], [BEYOND], [len(tile)]], more)))
        launches = [SpanLaunch(range(len(tile) + more), launches[0].rows, len(tile) + more)]
    owner = np.arange(tiles).repeat(counts)
    in_tile = np.arange(len(owner)) - rows_before[owner]
    rows = np.stack((at[owner] + in_tile, counts[owner], spans[owner]))
    return SpanPlan(
        launches,
        upload(works.astype(np.int32), device),
        upload(rows.astype(np.int32), device),
    )


def part_bytes(tile_rows: int, context: int, *, span: int, width: int) -> int:
    """The most that the buffer takes, where tiles have at most `tile_rows` rows and see at most `context` tokens."""
    of_tile = 4 * width * tile_rows * -(-context // span)
    return max(PART_BYTES, of_tile)


def row_width(heads: int, dim: int) -> int:
    """Floats of a row in the buffer: what each head gives, and its log-sum-exp."""
    return heads * (dim + 1)


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of all counts before each one, and of all of them."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums

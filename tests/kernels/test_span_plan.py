"""The work list of attention that is summed span by span: what exists and no more, in bounded memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.attention import mla_attention, paged_attention, span_plan
from headrace_kernels.attention.span_plan import PART_BYTES, SpanPlan, part_bytes, row_width

CPU = torch.device("cpu")


def pairs(plan: SpanPlan) -> list[tuple[int, int]]:
    """Tile and span of each program, in order."""
    tiles, spans, _ = plan.works.tolist()
    return list(zip(tiles, spans, strict=True))


def test_only_what_a_tile_sees_is_listed() -> None:
    plan = span_plan.span_plan([2, 1, 3], [100, 1, 65], span=32, width=8, device=CPU)
    assert pairs(plan) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [launch.works for launch in plan.launches] == [range(8)]
    assert plan.launches[0].rows == range(6)
    assert plan.launches[0].parts == 2 * 4 + 1 + 3 * 3
    first, step, spans = plan.rows.tolist()
    assert step == [2, 2, 1, 3, 3, 3]
    assert spans == [4, 4, 1, 3, 3, 3]
    assert first == [0, 1, 8, 9, 10, 11]


def test_no_two_results_share_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for part_rows in (1, 7, 40, 10_000):
        monkeypatch.setattr(span_plan, "PART_BYTES", part_rows * 4 * 8)
        counts, contexts = random.integers(1, 5, 50), random.integers(1, 300, 50)
        plan = span_plan.span_plan(counts, contexts, span=32, width=8, device=CPU)
        owners = np.arange(50).repeat(counts)
        starts = np.cumsum(counts) - counts
        assert list(itertools.chain(*(launch.works for launch in plan.launches))) == list(
            range(plan.works.shape[1])
        )
        for launch in plan.launches:
            tiles = {int(owners[row]) for row in launch.rows}
            most = max(counts[tile] * -(-contexts[tile] // 32) for tile in tiles)
            assert launch.parts <= max(part_rows, most)
            assert len(tiles) == 1 or launch.parts <= part_rows
            written: set[tuple[int, int, int]] = set()
            for work in launch.works:
                tile, span, place = plan.works[:, work].tolist()
                assert tile in tiles
                for row in range(int(counts[tile])):
                    written.add((int(starts[tile]) + row, span, place + row))
            read = {
                (row, span, int(plan.rows[0, row] + span * plan.rows[1, row]))
                for row in launch.rows
                for span in range(int(plan.rows[2, row]))
            }
            assert written == read
            assert sorted(place for _, _, place in written) == list(range(launch.parts))


def test_a_chunk_of_llama_8b_behind_a_long_context_stays_in_bounds() -> None:
    """8,192 rows behind 128k tokens took 17 GB for spans that wait to be merged."""
    heads, dim, rows, context = 32, 128, 8192, 131_072
    plan = paged_attention.attention_plan([0, rows], [context], heads=heads, dim=dim, device=CPU)
    taken = [launch.parts * heads * (dim + 1) * 4 for launch in plan.spans.launches]
    bound = part_bytes(
        paged_attention.ROWS_TILE, context, span=paged_attention.SPAN, width=row_width(heads, dim)
    )
    assert bound == PART_BYTES
    assert max(taken) <= bound
    assert sum(taken) > 16_800_000_000


def test_one_long_context_costs_the_rows_beside_it_nothing() -> None:
    """128 answers, of which one has 128k tokens: what was padded to it is no longer there."""
    positions = np.full(128, 500, dtype=np.int32)
    positions[77] = 131_071
    plan = mla_attention.attention_plan(positions, heads=128, kv_lora=512, device=CPU)
    assert plan.works.shape[1] == 127 + 131_072 // mla_attention.SPAN


def test_a_tile_that_alone_is_more_than_the_bound_gets_what_it_needs() -> None:
    million = 1 << 20
    plan = paged_attention.attention_plan([0, 40], [million], heads=64, dim=128, device=CPU)
    tile = paged_attention.ROWS_TILE * million // paged_attention.SPAN
    assert [launch.parts for launch in plan.spans.launches] == [tile, tile, tile // 2]
    width = row_width(64, 128)
    bound = part_bytes(paged_attention.ROWS_TILE, million, span=paged_attention.SPAN, width=width)
    assert bound == tile * 4 * width > PART_BYTES

"""Experts move between ranks that are processes, over each transport: to the bits of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_kernels.moe.placement import LayerPlacement
from helpers.ranks.moving_ranks import EXPERTS, LAYERS, ROWS, Model, run_rounds
from helpers.ranks.processes import Place, RankProcesses, rank_processes
from helpers.ranks.scenes import opened

PLACEMENTS = {
    2: LayerPlacement(EXPERTS, (tuple(range(7)), tuple(range(5, 12)))),
    4: LayerPlacement(EXPERTS, ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9), (9, 10, 11, 4))),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def on_rank(place: Place, kind: str, dtype: str) -> tuple[list[list[float]], list[str], int]:
    """Answers of all rounds, the placements of all rounds, and layers that changed."""
    with opened(place, kind) as transport, torch.inference_mode():
        outcome = run_rounds(
            transport,
            [PLACEMENTS[place.ranks]] * LAYERS,
            ROWS.tensor_split(place.ranks),
            rounds=40,
            dtype=dtype,
            piece_bytes=4000,
        )
    answers = [answer.flatten().tolist() for answer in outcome.answers]
    return answers, [str(it) for it in outcome.placements], outcome.rebalancer.done.experts_moved


@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (4, "int8")])
def test_processes_move_experts_and_no_bit_changes(
    size: int, dtype: str, kind: str, ranks: RankProcesses
) -> None:
    found = ranks.run(on_rank, size, kind, dtype)
    alone = Model(dtype)(ROWS).flatten().tolist()
    answers, placements, moved = zip(*found, strict=True)
    assert len(answers[0]) == 40
    for of_ranks in zip(*answers, strict=True):
        assert [x for part in of_ranks for x in part] == alone
    assert all(one == placements[0] for one in placements)
    assert len(set(placements[0])) > 1 and min(moved) > 0

"""Parcels between ranks that are processes: what is sent arrives, whatever its size and type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_kernels.moe.transport import Span
from helpers.ranks.processes import Place, RankProcesses, rank_processes
from helpers.ranks.scenes import even, opened, random_sizes, swap

KINDS = ["shared_memory", "gloo"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def many(place: Place, kind: str) -> str:
    """Exchanges of any sizes, empty ones among them, in rounds that leave numbers out."""
    with opened(place, kind) as transport:
        for round_number in (1, 2, 5):
            transport.begin(round_number)
            for number in range(6):
                seed = 100 * round_number + number
                swap(transport, random_sizes(place.ranks, 9, seed), seed)
            swap(transport, even(place.ranks, 0), 0)
    return "done"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_every_rank_receives_what_was_sent(ranks: RankProcesses, number: int, kind: str) -> None:
    assert ranks.run(many, number, kind) == ["done"] * number


def long(place: Place, kind: str) -> str:
    """Parcels of up to a hundred slices both ways at once, beside short and empty ones."""
    with opened(place, kind, slice_bytes=4096) as transport:
        transport.begin(1)
        for number in range(3):
            swap(transport, random_sizes(place.ranks, 4_000, number), number)
        one_way = [[4_000 * (sender < receiver) for receiver in range(place.ranks)]
                   for sender in range(place.ranks)]  # fmt: skip
        swap(transport, one_way, 9)
    return "done"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [2, 3])
def test_long_parcels_go_in_pieces(ranks: RankProcesses, number: int, kind: str) -> None:
    assert ranks.run(long, number, kind) == ["done"] * number


def same_rows(place: Place, kind: str) -> list[list[float]]:
    """All rows to all ranks, of a column whose rows do not lie side by side; arrived rows stay as they are."""
    with opened(place, kind) as transport:
        transport.begin(1)
        rows = torch.arange(6.0).view(2, 3).T + 10 * place.rank
        first = transport.post((rows,), [Span(0, 3)] * place.ranks)()
        kept = first.columns[0].clone()
        for _ in range(4):
            transport.post((rows - 100,), [Span(1, 3)] * place.ranks)()
        assert torch.equal(first.columns[0], kept)
        return kept.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_parcels_may_overlap_and_what_arrived_stays(ranks: RankProcesses, kind: str) -> None:
    due = [[row + 10 * rank, 3 + row + 10 * rank] for rank in range(3) for row in range(3)]
    assert ranks.run(same_rows, 3, kind) == [due] * 3


def waiting_later(place: Place, kind: str) -> str:
    """A rank does something between sending and waiting; ranks are ahead of each other by what channels hold."""
    with opened(place, kind) as transport:
        for round_number in range(1, 40):
            transport.begin(round_number)
            columns = (torch.full((place.ranks, 2), place.rank + 10 * round_number),)
            spans = [Span(rank, rank + 1) for rank in range(place.ranks)]
            wait = transport.post(columns, spans)
            compute = torch.ones(50, 50) @ torch.ones(
                50, 50 * (1 + (place.rank + round_number) % 3)
            )
            assert compute[0, 0] == 50
            [got] = wait().columns
            assert got[:, 0].tolist() == [rank + 10 * round_number for rank in range(place.ranks)]
    return "done"


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_follow_each_other(ranks: RankProcesses, kind: str) -> None:
    assert ranks.run(waiting_later, 4, kind) == ["done"] * 4

"""Turns: every rank takes each one once and in order, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from headrace.worker.parallel.turns import (
    HEADER,
    Note,
    Said,
    Turns,
    TurnsDiffer,
    _packed,  # pyright: ignore[reportPrivateUsage]
)
from headrace_kernels.moe.transport import RankLost, StepAborted
from helpers.kernels.expert_ranks import Threads, ThreadTransport
from helpers.ranks.moving_ranks import Faults, FaultyTransport

CPU = torch.device("cpu")


class Diary:
    """Writes down what was taken in each turn; says its turn, its rank and who it is for."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.taken: list[list[tuple[int, list[int] | None]]] = []
        self.fails = 0  # so often what comes cannot be taken

    def speak(self) -> tuple[Note, Sequence[torch.Tensor]]:
        said = [[len(self.taken), self.rank, to] for to in range(self.ranks)]
        return Note(state=7), [torch.tensor(one, dtype=torch.uint8) for one in said]

    def take(self, said: Sequence[Said]) -> None:
        if self.fails:
            self.fails -= 1
            raise ValueError("not now")
        self.taken.append(
            [(one.turn, None if one.body is None else one.body.tolist()) for one in said]
        )


def diaries(rounds: int, faults: Faults, fails: int = 0, ranks: int = 3) -> list[Diary]:
    """So many rounds; a round that a rank misses is over for all."""

    def work(inner: ThreadTransport) -> Diary:
        transport = FaultyTransport(inner, faults)
        turns, diary = Turns(transport, CPU), Diary(inner.rank, ranks)
        for number in range(rounds):
            diary.fails = fails if (number, inner.rank) == (1, 1) else diary.fails
            transport.turn()
            try:
                turns.run(diary)
            except (StepAborted, ValueError):
                assert turns.missed
        return diary

    return Threads(ranks).run(work)


def check(found: list[Diary], least: int) -> None:
    most = max(len(diary.taken) for diary in found)
    for rank, diary in enumerate(found):
        assert len(diary.taken) in (most - 1, most) and most >= least
        for turn, said in enumerate(diary.taken):
            assert said == [(turn, [turn, source, rank]) for source in range(3)]


def test_each_rank_hears_what_all_said() -> None:
    check(diaries(5, Faults()), 5)


@pytest.mark.parametrize("missing", [{0}, {2}, {0, 1}, {0, 1, 2}])
def test_a_missed_turn_is_said_again(missing: set[int]) -> None:
    faults = Faults(misses=lambda rank, exchange: rank in missing and exchange in (2, 5))
    check(diaries(12, faults), 6)


def test_a_turn_that_cannot_be_taken_is_taken_later() -> None:
    check(diaries(8, Faults(), fails=2), 5)


def test_a_turn_that_never_can_be_taken_ends_the_group() -> None:
    def work(inner: ThreadTransport) -> None:
        turns, diary = Turns(inner, CPU), Diary(0, 1)
        diary.fails = 9
        for _ in range(2):
            with pytest.raises(ValueError, match="not now"):
                turns.run(diary)
        with pytest.raises(RankLost, match="rank 0 is lost: turn 0 failed 3 times here: not now"):
            turns.run(diary)

    Threads(1).run(work)


def test_only_failures_of_one_turn_are_counted() -> None:
    def work(inner: ThreadTransport) -> int:
        turns, diary = Turns(inner, CPU), Diary(0, 1)
        for _ in range(3):
            diary.fails = 2
            for _ in range(2):
                with pytest.raises(ValueError, match="not now"):
                    turns.run(diary)
            turns.run(diary)
        return len(diary.taken)

    assert Threads(1).run(work) == [3]


def test_a_body_that_was_damaged_is_none() -> None:
    def flip(rank: int, part: torch.Tensor) -> torch.Tensor:
        bad = part.clone()
        bad[-1] ^= rank == 2  # what comes to rank 2
        return bad

    found = diaries(1, Faults(damage=flip))
    assert found[2].taken == [[(0, None)] * 3]
    assert found[0].taken == [[(0, [0, source, 0]) for source in range(3)]]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda part: part[: HEADER.size - 1], r"sent \(39,\) of torch.uint8, no turn"),
        (lambda part: torch.cat((part[1:], part[:1])), "begins with b'Rt1"),
        (lambda part: part.float(), "of torch.float32, no turn"),
        (lambda part: part[:0], r"sent \(0,\)"),
    ],
)
def test_what_is_no_turn_names_the_rank(
    damage: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    faults = Faults(damage=lambda rank, part: damage(part) if rank == 0 else part)
    with pytest.raises(TurnsDiffer, match=f"rank 0 .*{text}"):
        diaries(1, faults)


def test_ranks_that_are_turns_apart_are_told_so() -> None:
    def work(inner: ThreadTransport) -> None:
        turns = Turns(inner, CPU)
        turns.number = 3 * inner.rank
        turns.run(Diary(inner.rank, 2))

    with pytest.raises(TurnsDiffer, match=r"in turns \[0, 3\]: restart the group"):
        Threads(2).run(work)


def test_a_turn_that_a_rank_says_otherwise_the_second_time_is_not_taken() -> None:
    def work(inner: ThreadTransport) -> None:
        turns, diary = Turns(inner, CPU), Diary(inner.rank, 2)
        if inner.rank == 1:  # is ahead, and does not know any more what it said
            turns.number, other = 1, diary.speak()
            turns._before = _packed(7, *other, CPU)  # pyright: ignore[reportPrivateUsage]
        try:
            turns.run(diary)
        finally:
            assert diary.taken == []

    with pytest.raises(TurnsDiffer, match="turn 0 was not said again by all: restart the group"):
        Threads(2).run(work)

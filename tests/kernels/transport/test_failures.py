"""Ranks that fail, die, stand still, come late or do not fit: the others learn which one it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace_kernels.moe.transport import RankLost, Span, StepAborted
from helpers.ranks.processes import Ended, Place, Raised, RankProcesses, end, rank_processes, stop
from helpers.ranks.scenes import check, even, opened, sent_by, swap, together

KINDS = ["shared_memory", "gloo"]
CULPRITS = [0, 2]  # the first rank, which makes what the others share, and another one
LONG_S, SHORT_S = 60.0, 2.0  # deadlines that are not passed, and that are


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def raised(answers: list[Any]) -> list[Raised]:
    """What the ranks that live raised."""
    found = [answer for answer in answers if not isinstance(answer, Ended)]
    for answer in found:
        assert isinstance(answer, Raised), answer
    return found


# --- a rank that fails inside of a round ---

WHERE = ["before", "between", "posted"]


def aborting(place: Place, kind: str, culprit: int, where: str) -> list[str]:
    """Round 1 is aborted by one rank; round 2 is as if nothing had been."""
    said: list[str] = []
    with opened(place, kind, deadline_s=LONG_S) as transport:
        transport.begin(1)
        try:
            if where != "before":
                swap(transport, even(place.ranks, 3), 1)
            if place.rank == culprit:
                if where == "posted":
                    transport.post((torch.zeros(place.ranks, 5_000),), _one_each(place.ranks))
                transport.abort("no memory for 512 rows")
            else:
                for number in range(2, 5):
                    swap_any(transport, place.ranks, where, number)
        except StepAborted as aborted:
            said.append(f"{aborted.rank}: {aborted.reason}")
        for round_number in (2, 3):
            transport.begin(round_number)
            for number in range(3):
                swap(transport, even(place.ranks, 40), 10 * round_number + number)
    return said


def _one_each(ranks: int) -> list[Span]:
    return [Span(rank, rank + 1) for rank in range(ranks)]


def swap_any(transport: Any, ranks: int, where: str, number: int) -> None:
    if where == "posted":
        transport.post((torch.zeros(ranks, 5_000),), _one_each(ranks))()
    else:
        swap(transport, even(ranks, 3), number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_fails_ends_the_round_for_all_and_the_next_round_works(
    ranks: RankProcesses, culprit: int, where: str, kind: str
) -> None:
    answers = ranks.run(aborting, 3, kind, culprit, where)
    due = [f"{culprit}: no memory for 512 rows"]
    assert answers == [[] if rank == culprit else due for rank in range(3)]


LATE = (1, 3, 5)  # the rounds that a rank aborts once it is through with their last exchange


def aborting_late(
    place: Place, kind: str, culprit: int, slow: int | None
) -> list[tuple[int, str, int]]:
    """The rounds that ended by an abort here, with its words and its rank. The slow rank reads what came once the
    culprit has aborted, so that its last exchange and the abort meet for certain.
    """
    said: list[tuple[int, str, int]] = []
    sizes = even(place.ranks, 3)
    with opened(place, kind, deadline_s=LONG_S) as transport:
        for round_number in range(1, 7):
            transport.begin(round_number)
            aborts = round_number in LATE
            aborted_flag = place.folder / f"aborted-{round_number}"
            try:
                wait = transport.post(*sent_by(transport, sizes, round_number))
                if place.rank == slow and aborts:
                    while not aborted_flag.exists():
                        os.sched_yield()
                check(transport, wait(), sizes, round_number)
            except StepAborted as aborted:
                said.append((round_number, aborted.reason, aborted.rank))
            if place.rank == culprit and aborts:
                transport.abort("the sampler failed")
                aborted_flag.touch()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_after_the_last_exchange_spoils_no_other_round(
    ranks: RankProcesses, kind: str
) -> None:
    """A rank that still is in that exchange may hear of it or not; nobody hears of it in another round."""
    check_late(ranks.run(aborting_late, 3, kind, 1, None))


def test_a_rank_that_reads_slowly_may_hear_of_a_failure_after_the_last_exchange(
    ranks: RankProcesses,
) -> None:
    check_late(ranks.run(aborting_late, 3, "shared_memory", 1, 2))


def check_late(answers: list[Any]) -> None:
    possible = {(number, "the sampler failed", 1) for number in LATE}
    assert answers[1] == []
    for said in (answers[0], answers[2]):
        assert set(said) <= possible
        assert len(said) == len(set(said))


def both_aborting(place: Place, kind: str) -> list[int]:
    said: list[int] = []
    with opened(place, kind, deadline_s=LONG_S) as transport:
        for round_number in range(1, 5):
            transport.begin(round_number)
            try:
                swap(transport, even(place.ranks, 3), 1)
                if place.rank < 2:
                    transport.abort(f"{place.rank} failed")
                else:
                    swap(transport, even(place.ranks, 3), 2)
            except StepAborted as aborted:
                said.append(aborted.rank)
        transport.begin(9)
        swap(transport, even(place.ranks, 3), 3)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_may_fail_in_one_round(ranks: RankProcesses, kind: str) -> None:
    first, second, other = ranks.run(both_aborting, 3, kind)
    # Who is about to fail may hear of the other before.
    assert set(first) <= {1} and set(second) <= {0}
    assert len(other) == 4 and set(other) <= {0, 1}


# --- a rank that does not come ---


def missing(
    place: Place, kind: str, deadline_s: float, culprit: int, misbehave: Callable[[], None]
) -> None:
    with opened(place, kind, deadline_s=deadline_s) as transport:
        transport.begin(7)
        swap(transport, even(place.ranks, 3), 1)
        if place.rank == culprit:
            misbehave()
        swap(transport, even(place.ranks, 3), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_rank_that_dies_is_named_before_the_deadline(
    ranks: RankProcesses, culprit: int, kind: str
) -> None:
    answers = ranks.run(missing, 3, kind, LONG_S, culprit, end)
    assert isinstance(answers[culprit], Ended)
    for answer in raised(answers):
        assert (answer.kind, answer.rank) == ("RankLost", culprit), answer.trace
        assert "exchange 2 of round 7" in answer.text
        assert f", {LONG_S:.1f} s" not in answer.text, "nobody waited for the deadline"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_rank_that_stands_still_is_named_at_the_deadline(
    ranks: RankProcesses, culprit: int, kind: str
) -> None:
    answers = ranks.run(missing, 3, kind, SHORT_S, culprit, stop, stopped=culprit)
    for answer in raised(answers):
        assert (answer.kind, answer.rank) == ("RankLost", culprit), answer.trace
        assert f"exchange 2 of round 7, {SHORT_S:.1f} s" in answer.text


def leave() -> None:
    raise KeyError("this rank goes")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_is_named(ranks: RankProcesses, kind: str) -> None:
    answers = ranks.run(missing, 3, kind, LONG_S, 1, leave)
    assert [answer.kind for answer in answers] == ["RankLost", "KeyError", "RankLost"]
    assert [answers[0].rank, answers[2].rank] == [1, 1]


def late(place: Place, kind: str) -> str:
    """Rank 0 comes once the others gave it up."""
    with opened(place, kind, deadline_s=SHORT_S) as transport:
        together(place, "opened")
        gone = place.folder / "given-up"
        try:
            transport.begin(1)  # where another rank was slower still, it is told here
            if place.rank == 0:
                while len(list(place.folder.glob("given-up*"))) < place.ranks - 1:
                    os.sched_yield()
            swap(transport, even(place.ranks, 3), 1)
        except RankLost as lost:
            gone.with_suffix(f".{place.rank}").touch()
            return str(lost)
    return "in time"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_comes_too_late_learns_that_it_is_lost(ranks: RankProcesses, kind: str) -> None:
    first, *others = ranks.run(late, 3, kind)
    for answer in others:
        assert answer.startswith("rank 0 is lost: exchange 1 of round 1"), answer
    assert "is lost" in first


# --- ranks that do not fit ---


def other_round(place: Place, kind: str) -> None:
    with opened(place, kind, deadline_s=SHORT_S) as transport:
        transport.begin(4 if place.rank else 3)
        swap(transport, even(place.ranks, 3), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_in_different_rounds_are_told(ranks: RankProcesses, kind: str) -> None:
    for answer in ranks.run(other_round, 2, kind):
        assert answer.kind == "RankLost", answer
        assert "round" in answer.text


def other_columns(place: Place, kind: str) -> None:
    with opened(place, kind, deadline_s=LONG_S) as transport:
        transport.begin(1)
        spans = [Span(0, 2)] * place.ranks
        transport.post((torch.zeros(2, 4 + place.rank),), spans)()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_another_width_are_told(ranks: RankProcesses, kind: str) -> None:
    for answer in ranks.run(other_columns, 2, kind):
        assert answer.kind == "RankLost", answer
        assert "2 rows of" in answer.text


def backwards(place: Place, kind: str) -> list[str]:
    said: list[str] = []
    with opened(place, kind) as transport:
        columns = (torch.zeros(2, 4),)
        for act in (
            lambda: transport.post(columns, [Span(0, 1)]),
            lambda: transport.begin(1),
            lambda: transport.begin(0),
            lambda: transport.begin(1),
            lambda: transport.post(columns, []),
            lambda: transport.post(columns, [Span(0, 3)]),
            lambda: transport.post(columns, [Span(2, 1)]),
        ):
            try:
                act()
            except (ValueError, RuntimeError) as error:
                said.append(type(error).__name__)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_calls_out_of_order_are_refused(ranks: RankProcesses, kind: str) -> None:
    [said] = ranks.run(backwards, 1, kind)
    assert said == [*["RuntimeError", "ValueError"], *["ValueError"] * 4]


def closed_meanwhile(place: Place, kind: str) -> str:
    """Another thread closes the transport of a rank that waits; the other rank stands by."""
    with opened(place, kind, deadline_s=LONG_S) as transport:
        transport.begin(1)
        swap(transport, even(place.ranks, 1), 1)
        flag = place.folder / "learnt"
        if place.rank == 1:
            while not flag.exists():
                os.sched_yield()
            return "stood by"
        wait = transport.post((torch.zeros(2, 4),), [Span(0, 1), Span(1, 2)])
        threading.Timer(0.1, transport.close).start()
        try:
            wait()
        except RankLost as lost:
            return str(lost)
        finally:
            flag.touch()
    return "not closed"


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_learns_that_its_own_transport_was_closed(
    ranks: RankProcesses, kind: str
) -> None:
    first, second = ranks.run(closed_meanwhile, 2, kind)
    assert first == "rank 0 is lost: it has left the group"
    assert second == "stood by"

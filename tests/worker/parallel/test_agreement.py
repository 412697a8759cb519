"""What rank 0 collects and passes on, and what a rank makes of it, message by message."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.agreement import Leader, Member, Outgoing, has_left, is_asleep
from headrace.worker.parallel.life_signs import LifeSigns
from headrace.worker.parallel.messages import BadMessage, Kind, Message
from headrace_kernels.moe.transport import RankLost, StepAborted

SOME = RankLoad(rows=3)
NONE = RankLoad()
LEAVES = RankLoad(drain_ms=0, at_rest=True)


def leader(ranks: int = 3) -> Leader:
    return Leader(ranks, LifeSigns(range(1, ranks), 4.0))


def told(out: Outgoing) -> list[tuple[list[int], Kind, int]]:
    """To whom, what, and of which number."""
    return [(list(ranks), message.kind, message.number) for ranks, message in out]


def begin(of: Leader, number: int, loads: Sequence[RankLoad], now_s: float = 0.0) -> Outgoing:
    """All ranks come to a round; what follows the last of them."""
    out: Outgoing = []
    for rank, load in enumerate(loads):
        out = of.take(rank, messages.load(number, load), now_s)
    return out


def depth(number: int, turn: int = 1, passes: int = 1) -> Message:
    return messages.depth(Kind.DEPTH, number, turn, passes)


def aborted(number: int, rank: int) -> Message:
    return messages.about_rank(Kind.ABORTED, number, rank, "out of luck")


def test_the_first_load_wakes_the_others_once_and_the_last_brings_all() -> None:
    one = leader()
    assert told(one.take(1, messages.load(1, SOME), 0.0)) == [([0, 2], Kind.WAKE, 1)]
    assert told(one.take(0, messages.load(1, NONE), 0.0)) == []
    assert told(one.take(2, messages.load(1, NONE), 0.0)) == [([0, 1, 2], Kind.LOADS, 1)]
    assert told(one.take(2, messages.load(2, NONE), 0.0)) == [], "nobody slept"


def test_whom_others_have_waited_for_longest_is_awaited() -> None:
    one = leader()
    assert one.awaited() is None
    one.take(2, Message(Kind.FACTS, 1, b"{}"), 7.0)
    one.take(1, messages.load(1, SOME), 5.0)
    one.take(2, messages.load(1, SOME), 6.0)
    found = one.awaited()
    assert found is not None
    assert (found.missing, found.since_s, found.what) == ([0], 5.0, "a load for round 1")


def test_after_an_abort_nobody_is_awaited_and_late_depths_of_the_round_are_passed_over() -> None:
    one = leader()
    begin(one, 1, [SOME] * 3)
    one.take(0, depth(1), 1.0)
    assert one.awaited() is not None
    assert told(one.take(2, aborted(1, 2), 2.0)) == [([0, 1], Kind.ABORTED, 1)]
    assert one.awaited() is None
    assert one.take(1, depth(1), 3.0) == []
    assert one.awaited() is None
    assert told(begin(one, 2, [SOME] * 3)) == [([0, 1, 2], Kind.LOADS, 2)]
    for rank in range(2):
        assert one.take(rank, depth(2, passes=rank), 4.0) == []
    assert told(one.take(2, depth(2), 4.0)) == [([0, 1, 2], Kind.DEPTHS, 2)]


@pytest.mark.parametrize(
    ("twice", "why"),
    [
        (messages.load(2, SOME), "two loads for round 2"),
        (depth(1), "two numbers of drafting passes for turn 1"),
        (Message(Kind.FACTS, 1, b"{}"), "facts for meeting 1, here is 1"),
    ],
)
def test_a_rank_that_brings_the_same_twice_is_told(twice: Message, why: str) -> None:
    one = leader()
    begin(one, 1, [SOME] * 3)
    one.take(1, twice, 0.0)
    with pytest.raises(BadMessage, match=why):
        one.take(1, twice, 0.0)


def test_a_rank_aborts_nothing_in_the_name_of_another_one_and_no_round_to_come() -> None:
    one = leader()
    begin(one, 1, [SOME] * 3)
    for wrong in (aborted(1, 2), aborted(2, 1)):
        with pytest.raises(BadMessage, match="aborts round"):
            one.take(1, wrong, 0.0)


def test_of_two_lost_ranks_the_first_is_told_and_of_those_that_left_none() -> None:
    one = leader()
    assert told(one.lost(1, "its link ended")) == [([0, 1, 2], Kind.LOST, 0)]
    assert one.lost(2, "its link ended") == []
    assert one.over == (1, "its link ended")
    gone = leader()
    begin(gone, 1, [LEAVES] * 3)
    assert gone.lost(1, "its link ended") == []
    assert gone.over is None


def test_ranks_sleep_where_none_computes_and_leave_where_all_do() -> None:
    assert is_asleep([NONE, RankLoad(waiting_tokens=3)])
    assert not is_asleep([NONE, SOME])
    assert not is_asleep([NONE, RankLoad(drafts_first=True)])
    assert has_left([LEAVES, LEAVES])
    assert not has_left([LEAVES, NONE])


def loads(number: int, *of_ranks: RankLoad) -> Message:
    return Message(
        Kind.LOADS, number, b"".join(messages.load(number, one).body for one in of_ranks)
    )


def test_only_a_round_that_this_rank_has_not_begun_wakes_it() -> None:
    member = Member(1, 2)
    member.begin(NONE)
    member.take(Message(Kind.WAKE, 1))  # crossed its load
    assert member.asleep
    member.take(loads(1, NONE, NONE))
    member.take(Message(Kind.WAKE, 2))
    assert not member.asleep


def test_an_abort_is_for_its_own_round_alone() -> None:
    member = Member(1, 2)
    member.begin(SOME)
    member.take(loads(1, SOME, SOME))
    member.depth(1)
    member.take(aborted(1, 0))
    with pytest.raises(StepAborted, match="out of luck"):
        member.agreed_depth()
    member.take(messages.depth(Kind.DEPTHS, 1, 1, 2))  # was on its way
    member.begin(SOME)
    member.take(aborted(1, 0))  # again, and late
    member.take(loads(2, SOME, SOME))
    member.depth(1)
    assert member.agreed_depth() is None
    member.take(messages.depth(Kind.DEPTHS, 2, 1, 2))
    assert member.agreed_depth() == 2


def test_a_group_that_left_loses_nobody_and_one_that_is_over_keeps_its_reason() -> None:
    left = Member(1, 2)
    left.begin(LEAVES)
    left.take(loads(1, LEAVES, LEAVES))
    left.lose(0, "ended its control link")
    assert left.left and left.lost is None
    over = Member(1, 2)
    over.lose(0, "the first")
    over.lose(1, "the second")
    with pytest.raises(RankLost, match="rank 0 is lost: the first"):
        over.loads()
    assert not over.asleep, "whoever sleeps has to notice"

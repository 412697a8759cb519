"""Ranks that stand still while nobody waits for them, and who is named where ranks miss each other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import messages
from headrace.worker.parallel.control import ControlLink
from headrace.worker.parallel.group import RankGroup
from headrace.worker.parallel.life_signs import BEATS, LifeSigns
from headrace.worker.parallel.messages import Kind, Message, Messages
from headrace_kernels.moe.transport import RankLost
from helpers.worker.rank_processes import RankProcess, group_of

SOME = RankLoad(rows=3)
NONE = RankLoad()
TIMEOUT_S = 4.0


# --- what is counted ---


def listening(ranks: int = 3, patience_s: float = 0.0) -> LifeSigns:
    signs = LifeSigns(range(1, ranks), TIMEOUT_S, patience_s=patience_s)
    signs.start(0.0)
    return signs


def pass_time(signs: LifeSigns, begin_s: float, end_s: float, *heard: int) -> None:
    """Half seconds in which these ranks are heard."""
    for half in range(int(begin_s * 2), int(end_s * 2)):
        for rank in heard:
            signs.heard(rank)
        signs.listened((half + 1) / 2)


def test_a_silent_rank_is_lost_after_the_deadline_and_no_sooner() -> None:
    signs = listening()
    pass_time(signs, 0, 3.5, 1)
    assert signs.lost() is None
    pass_time(signs, 3.5, 4, 1)
    assert signs.lost() == (2, "nothing was heard of it for 4.0 s")


def test_patience_comes_on_top_of_the_deadline() -> None:
    signs = listening(patience_s=2.0)
    pass_time(signs, 0, 5.5)
    assert signs.lost() is None
    pass_time(signs, 5.5, 6)
    assert signs.lost() is not None


def test_nobody_is_silent_before_the_start() -> None:
    signs = LifeSigns([1], TIMEOUT_S)
    pass_time(signs, 0, 100)
    assert signs.lost() is None
    assert signs.next_s(100.0) is None
    assert not signs.beat_due(100.0)


def test_who_stood_still_itself_accuses_nobody() -> None:
    signs = listening()
    pass_time(signs, 0, 1)
    signs.listened(500.0)
    assert signs.lost() is None
    signs.heard(1)
    pass_time(signs, 500, 503.5, 1)
    assert signs.lost() is not None, "rank 2 was silent before and after"


def test_a_few_beats_are_due_within_the_deadline() -> None:
    signs = listening()
    times = [now / 10 for now in range(400)]
    beats = [now for now in times if signs.beat_due(now)]
    assert len(beats) == pytest.approx(BEATS * 40 / TIMEOUT_S, abs=1)
    assert signs.next_s(times[-1]) is not None


def test_the_next_look_is_due_with_the_next_beat_or_when_a_silent_rank_is_lost() -> None:
    signs = listening()
    assert signs.beat_due(0.0)
    assert signs.next_s(0.25) == 0.75, "four beats in four seconds"
    pass_time(signs, 0, 3.5)
    assert signs.beat_due(3.5)
    assert signs.next_s(3.5) == 0.5, "rather than the beat after a second"
    assert signs.next_s(9.0) == 0.0


def test_after_it_stood_still_a_rank_owes_one_beat() -> None:
    signs = listening()
    assert signs.beat_due(0.0)
    assert signs.beat_due(50.0)
    assert not signs.beat_due(50.5)
    assert signs.beat_due(51.0)


def test_of_missing_ranks_the_silent_one_is_likeliest_and_otherwise_one_that_does_not_wait() -> (
    None
):
    signs = listening(5)
    signs.waits(1, 3.9)
    signs.waits(2, 3.9)
    assert signs.likeliest([1, 2, 3, 4]) == 3
    pass_time(signs, 0, 3, 1, 3, 4)
    assert signs.likeliest([1, 2, 3]) == 2, "it froze while it waited"


def test_a_rank_that_waits_itself_is_not_to_blame() -> None:
    signs = listening(5)
    signs.waits(0, 3.9)
    signs.waits(1, 3.9)
    signs.waits(2, 3.8)
    signs.waits(3, 0.1)
    signs.waits(4, 3.8)
    rank, how = signs.blamed(2, 1, "exchange 3, 4.0 s")
    assert rank == 3
    assert how == "rank 2 waited for rank 1, which waits itself: exchange 3, 4.0 s"
    assert signs.blamed(2, 3, "exchange 3") == (3, "exchange 3")


def test_rank_0_is_to_blame_only_where_all_others_wait() -> None:
    """It decides this, so its threads run."""
    signs = LifeSigns(range(4), TIMEOUT_S)
    signs.start(0.0)
    signs.waits(1, 3.9)
    signs.waits(2, 1.5)
    assert signs.blamed(3, 1, "exchange 3")[0] == 2
    signs.waits(2, 3.9)
    assert signs.blamed(3, 1, "exchange 3")[0] == 0


def test_a_rank_that_gives_itself_up_is_believed() -> None:
    signs = listening(4)
    signs.waits(2, 3.9)
    assert signs.blamed(2, 2, "turn 7 failed 3 times here") == (2, "turn 7 failed 3 times here")


def test_a_rank_that_is_silent_is_to_blame_rather_than_one_that_is_heard() -> None:
    signs = listening(4)
    pass_time(signs, 0, 3, 1, 3)
    rank, how = signs.blamed(3, 1, "exchange 3, 4.0 s")
    assert rank == 2
    assert how == (
        "nothing was heard of it for 3.0 s, while rank 3 waited for rank 1: exchange 3, 4.0 s"
    )
    assert signs.blamed(3, 2, "exchange 3") == (2, "exchange 3")


def test_where_all_wait_for_each_other_the_word_of_the_first_counts() -> None:
    signs = listening(4)
    for rank in range(4):
        signs.waits(rank, 3.9)
    assert signs.blamed(3, 1, "exchange 3") == (1, "exchange 3")


# --- real processes ---


def living(ranks: list[RankProcess]) -> None:
    for one in ranks:
        one.do("show_life")


def lost_by(one: RankProcess) -> str:
    """What the rank says of the end of its group, once it knows of it."""
    while (found := one.do("check")) is None:
        one.wait_woken()
    return str(found)


@pytest.mark.parametrize("when", ["asleep", "in a round"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_rank_is_named_by_all_where_nobody_waits_for_it(frozen: int, when: str) -> None:
    with group_of(3, timeout_s=2.0) as ranks:
        if when == "in a round":
            for one in ranks:
                one.call("agree", SOME)
            assert [one.answer() for one in ranks] == [[SOME] * 3] * 3
        living(ranks)
        ranks[frozen].freeze()
        why = f"RankLost: rank {frozen} is lost: nothing was heard of it for "
        for rank, one in enumerate(ranks):
            if rank != frozen:
                assert lost_by(one).startswith(why)
        ranks[frozen].thaw()
        assert lost_by(ranks[frozen]).startswith("RankLost: rank ")


@pytest.mark.parametrize("work", ["on the others", "on the frozen rank"])
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_rank_is_named_by_all_that_wait_for_it(frozen: int, work: str) -> None:
    with group_of(3, timeout_s=2.0) as ranks:
        living(ranks)
        others = [one for rank, one in enumerate(ranks) if rank != frozen]
        if work == "on the frozen rank":
            ranks[frozen].call("agree", SOME)
            for one in others:
                one.wait_woken()
                one.call("agree", NONE)
            for one in ranks:
                one.answer()
        ranks[frozen].freeze()
        for one in others:
            one.call("agree", SOME)
        for one in others:
            assert str(one.answer()).startswith(f"RankLost: rank {frozen} is lost: ")


# --- one end that is a test ---


class Star:
    """Rank 0 as it is, and the sockets of all other ranks; or another rank, and the one of rank 0."""

    def __init__(self, rank: int, ranks: int, timeout_s: float) -> None:
        self.sockets: dict[int, socket.socket] = {}
        links: dict[int, ControlLink] = {}
        self._stack = ExitStack()
        for other in [0] if rank else range(1, ranks):
            ours, theirs = socket.socketpair()
            theirs.settimeout(60.0)
            self.sockets[other] = self._stack.enter_context(theirs)
            links[other] = ControlLink(ours)
        self._read = {other: Messages() for other in links}
        self.group = RankGroup(rank, ranks, links, timeout_s=timeout_s)
        self._stack.callback(self.group.close)

    def send(self, rank: int, message: Message) -> None:
        self.sockets[rank].sendall(message.packed())

    def next(self, rank: int, kind: Kind) -> Message:
        """The next message of this kind that the rank at the other end gets."""
        while True:
            for found in self._read[rank].feed(self.sockets[rank].recv(1 << 16)):
                if found.kind == kind:
                    return found

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def star_of_4() -> Iterator[Star]:
    star = Star(0, 4, timeout_s=60.0)
    yield star
    star.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_show_life_keep_their_group_whatever_their_threads_do(rank: int) -> None:
    star = Star(rank, 2, timeout_s=1.6)
    other = 1 - rank
    try:
        star.group.show_life()
        for _ in range(10 * BEATS // 4):  # longer than the deadline
            star.next(other, Kind.ALIVE)
            star.send(other, Message(Kind.ALIVE, 0))
        star.group.check()
    finally:
        star.close()


def test_a_rank_says_for_how_long_it_has_waited() -> None:
    star = Star(0, 2, timeout_s=8.0)
    try:
        star.group.show_life()
        assert star.next(1, Kind.ALIVE).number == 0
        with star.group.waiting():
            while not star.next(1, Kind.ALIVE).number:
                pass  # it had been said before
    finally:
        star.close()


def note(star: Star, rank: int, waits_ms: int) -> None:
    """Rank 0 has read for how long another rank has waited once it has passed on what came behind that."""
    star.send(rank, Message(Kind.ALIVE, waits_ms))
    star.send(rank, messages.about_rank(Kind.ABORTED, 0, rank, "of no round"))
    star.next(1 + rank % 3, Kind.ABORTED)


@pytest.mark.parametrize("first", [1, 2])
def test_of_two_accusations_at_once_the_verdict_names_the_rank_that_waits_for_nobody(
    star_of_4: Star, first: int
) -> None:
    """Rank 2 misses rank 1, which misses rank 3, which hangs: whoever speaks first, rank 3 is named."""
    star = star_of_4
    star.group.show_life()
    for rank, waits_ms in ((1, 59_000), (2, 58_000), (3, 0)):
        note(star, rank, waits_ms)
    accused = {2: 1, 1: 3}
    for accuser in (first, 3 - first):
        said = messages.about_rank(Kind.LOST, 0, accused[accuser], "exchange 2, 60.0 s")
        star.send(accuser, said)
    verdicts = {star.next(rank, Kind.LOST).body for rank in (1, 2, 3)}
    [(rank, how)] = [messages.read_about_rank(Message(Kind.LOST, 0, one), 4) for one in verdicts]
    assert rank == 3
    assert how.endswith("exchange 2, 60.0 s")
    with pytest.raises(RankLost, match="rank 3 is lost"):
        star.group.check()


def test_a_rank_that_misses_another_one_ends_with_the_verdict_of_rank_0() -> None:
    star = Star(1, 4, timeout_s=60.0)
    try:
        with ThreadPoolExecutor(1) as steps:
            accused = steps.submit(star.group.accuse, RankLost(2, "exchange 2, 60.0 s"))
            assert star.next(0, Kind.LOST).body == messages.RANK.pack(2) + b"exchange 2, 60.0 s"
            star.send(0, messages.about_rank(Kind.LOST, 0, 3, "as rank 0 knows"))
            with pytest.raises(RankLost, match="rank 3 is lost: as rank 0 knows"):
                accused.result()
    finally:
        star.close()


def test_a_rank_that_gets_no_verdict_keeps_to_what_it_found() -> None:
    star = Star(1, 4, timeout_s=60.0)
    try:
        with pytest.raises(RankLost, match="rank 2 is lost: exchange 2"):
            star.group.accuse(RankLost(2, "exchange 2, 60.0 s"))
    finally:
        star.close()

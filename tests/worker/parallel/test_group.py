"""Rounds of a group between real processes: agreement, sleep, failures, and ranks that go or stand still."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from headrace.engine.step.lockstep import RankLoad
from headrace.worker.parallel import group, messages
from headrace.worker.parallel.control import ControlLink
from headrace.worker.parallel.group import RankGroup
from headrace.worker.parallel.messages import HEAD, MAGIC, Kind, Message
from headrace_kernels.moe.transport import RankLost
from helpers.serving.server import eventually
from helpers.worker.rank_processes import RankProcess, group_of

SOME = RankLoad(rows=3, prompt_tokens=2, context_tokens=70, waiting_tokens=9, drafts_first=True)
NONE = RankLoad()
# Deadlines that are not passed, and that are; the first round of those has to fit into it on a busy machine, too.
LONG_S, SHORT_S = 60.0, 5.0
LEAVES = RankLoad(drain_ms=0, at_rest=True)


def together(ranks: list[RankProcess], loads: list[RankLoad]) -> list[object]:
    for one, load in zip(ranks, loads, strict=True):
        one.call("agree", load)
    return [one.answer() for one in ranks]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_loads_of_all_in_the_order_of_ranks(size: int) -> None:
    with group_of(size) as ranks:
        for turn in range(3):
            loads = [RankLoad(rows=10 * turn + rank) for rank in range(size)]
            loads[1] = SOME
            assert together(ranks, loads) == [loads] * size


def test_a_load_keeps_all_its_values() -> None:
    loads = [SOME, RankLoad(drain_ms=2_500), RankLoad(drain_ms=0, at_rest=True)]
    with group_of(3) as ranks:
        assert together(ranks, loads) == [loads] * 3


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_rank_with_work_wakes_the_others(first: int) -> None:
    with group_of(3) as ranks:
        ranks[first].call("agree", SOME)
        others = [one for rank, one in enumerate(ranks) if rank != first]
        for one in others:
            one.wait_woken()
            assert one.do("asleep") is False
            one.call("agree", NONE)
        assert len({str(one.answer()) for one in ranks}) == 1
        assert [one.do("asleep") for one in ranks] == [False] * 3
        together(ranks, [NONE] * 3)
        assert [one.do("asleep") for one in ranks] == [True] * 3
        ranks[first].call("agree", SOME)
        for one in others:
            one.wait_woken()


def test_the_most_drafting_passes_of_any_rank_are_agreed_on_turn_by_turn() -> None:
    with group_of(3) as ranks:
        together(ranks, [SOME] * 3)
        for depths, most in (([0, 2, 1], 2), ([0, 0, 0], 0), ([3, 1, 1], 3)):
            for one, depth in zip(ranks, depths, strict=True):
                one.call("agree_depth", depth)
            assert [one.answer() for one in ranks] == [most] * 3
        together(ranks, [NONE] * 3)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_ends_the_round_of_those_that_wait_in_it_and_no_other(
    failing: int,
) -> None:
    with group_of(3) as ranks:
        together(ranks, [SOME] * 3)
        others = [one for rank, one in enumerate(ranks) if rank != failing]
        for one in others:
            one.call("agree_depth", 1)
        ranks[failing].do("abort", ValueError("out of luck"))
        why = f"StepAborted: rank {failing} failed: ValueError: out of luck"
        assert [one.answer() for one in others] == [why] * 2
        assert together(ranks, [SOME] * 3) == [[SOME] * 3] * 3
        for one in ranks:
            one.call("agree_depth", 2)
        assert [one.answer() for one in ranks] == [2] * 3


def test_a_rank_that_is_through_with_a_round_hears_of_no_failure_in_it() -> None:
    with group_of(2) as ranks:
        together(ranks, [SOME] * 2)
        ranks[1].call("agree", SOME)
        ranks[0].do("abort", ValueError("late"))
        assert ranks[0].do("agree", SOME) == [SOME] * 2
        assert ranks[1].answer() == [SOME] * 2


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("when", ["asleep", "in a round", "in an agreement"])
def test_a_killed_rank_is_named_at_once_by_all_others(dead: int, when: str) -> None:
    with group_of(3, timeout_s=600.0) as ranks:
        others = [one for rank, one in enumerate(ranks) if rank != dead]
        if when == "in a round":
            together(ranks, [SOME] * 3)
        if when == "in an agreement":
            for one in others:
                one.call("agree", SOME)
            ranks[dead].kill()
        else:
            ranks[dead].kill()
            for one in others:
                one.wait_woken()
                one.call("agree", NONE)
        for one in others:
            assert one.answer() == f"RankLost: rank {dead} is lost: ended its control link"


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_rank_that_stands_still_is_named_after_the_deadline(frozen: int) -> None:
    with group_of(3, timeout_s=SHORT_S) as ranks:
        together(ranks, [SOME] * 3)
        ranks[frozen].freeze()
        others = [one for rank, one in enumerate(ranks) if rank != frozen]
        for one in others:
            one.call("agree", SOME)
        why = f"RankLost: rank {frozen} is lost: {SHORT_S:g} s were waited for its load of round 2"
        assert [one.answer() for one in others] == [why] * 2


# --- exchanges between agreements ---


def test_a_rank_that_is_killed_ends_the_exchange_of_those_that_wait_in_it() -> None:
    """Long before the deadline of the exchange."""
    with group_of(3, timeout_s=600.0, exchanges=True) as ranks:
        together(ranks, [SOME] * 3)
        for one in ranks[:2]:
            one.call("exchange")
        ranks[2].kill()
        for one in ranks[:2]:
            assert str(one.answer()).startswith("RankLost: rank 2 is lost: ")
            assert str(one.do("agree", SOME)).startswith("RankLost: rank 2 is lost: ")


def test_a_rank_that_fails_ends_the_exchange_of_those_that_wait_in_it() -> None:
    with group_of(3, exchanges=True) as ranks:
        together(ranks, [SOME] * 3)
        for one in ranks:
            one.call("exchange")
        assert [one.answer() for one in ranks] == [[0, 1, 2]] * 3
        for one in ranks[1:]:
            one.call("exchange")
        ranks[0].do("abort", ValueError("out of luck"))
        why = "StepAborted: rank 0 failed: ValueError: out of luck"
        assert [one.answer() for one in ranks[1:]] == [why] * 2
        together(ranks, [SOME] * 3)
        for one in ranks:
            one.call("exchange")
        assert [one.answer() for one in ranks] == [[0, 1, 2]] * 3


def test_a_rank_that_stands_still_in_an_exchange_is_named_by_all() -> None:
    with group_of(3, timeout_s=SHORT_S, exchanges=True) as ranks:
        together(ranks, [SOME] * 3)
        ranks[1].freeze()
        for one in (ranks[0], ranks[2]):
            one.call("exchange")
        for one in (ranks[0], ranks[2]):
            assert str(one.answer()).startswith("RankLost: rank 1 is lost: ")


def test_a_rank_that_others_gave_up_learns_it() -> None:
    with group_of(2, timeout_s=SHORT_S) as ranks:
        together(ranks, [SOME] * 2)
        why = f"RankLost: rank 0 is lost: {SHORT_S:g} s were waited for its drafting passes in round 1"
        assert ranks[1].do("agree_depth", 1) == why
        # it may have been woken by the first round before
        told = eventually(lambda: ranks[0].do("check"), lambda: "rank 0 does not learn it")
        assert told == why
        assert ranks[0].do("agree", SOME) == why


def test_time_in_agreements_and_exchanges_is_time_waited() -> None:
    with group_of(2, exchanges=True) as ranks:
        together(ranks, [SOME] * 2)
        for one in ranks:
            one.call("exchange")
        for one in ranks:
            one.answer()
            assert one.do("waited_s") > 0


def test_a_group_that_leaves_together_loses_nobody() -> None:
    with group_of(3) as ranks:
        together(ranks, [LEAVES] * 3)
        ranks[0].do("close")
        for one in ranks[1:]:
            assert one.do("check") is None
            one.do("close")


def test_facts_are_shared_before_the_first_round() -> None:
    with group_of(3) as ranks:
        for rank, one in enumerate(ranks):
            one.call("meet_facts", {"blocks": rank})
        assert [one.answer() for one in ranks] == [[{"blocks": rank} for rank in range(3)]] * 3


# --- one end that does not behave ---


class Pair:
    """Rank 0 of two as it is, and the socket of rank 1; or the other way round."""

    def __init__(self, rank: int, timeout_s: float = 20.0) -> None:
        ours, self.socket = socket.socketpair()
        self.other = 1 - rank
        self.group = RankGroup(rank, 2, {self.other: ControlLink(ours)}, timeout_s=timeout_s)

    def close(self) -> None:
        self.group.close()
        self.socket.close()

    def send(self, *sent: Message) -> None:
        for one in sent:
            self.socket.sendall(one.packed())


@pytest.fixture
def rank_0() -> Iterator[Pair]:
    with closing(Pair(0)) as pair:
        yield pair


@pytest.fixture
def rank_1() -> Iterator[Pair]:
    with closing(Pair(1)) as pair:
        yield pair


def text_of(kind: Kind, length: int) -> bytes:
    return HEAD.pack(MAGIC, kind, length, 1)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent bytes that are no message: b'GET /"),
        (HEAD.pack(MAGIC, 99, 0, 0), "sent bytes that are no message"),
        (text_of(Kind.LOAD, 10_000), "sent LOAD of 10000 bytes, of which"),
        (text_of(Kind.LOAD, 4) + b"abcd", "sent a load of 4 bytes, it has"),
        (messages.load(2, SOME).packed(), "sent a load for round 2 in round 1"),
        (messages.load(1, SOME).packed() * 2, " for round 1"),
        (messages.load(1, RankLoad(rows=-1)).packed(), "sent a load that cannot be"),
        (messages.depth(Kind.DEPTH, 1, 1, 1).packed(), "sent drafting passes of turn 1 in round 1"),
        (Message(Kind.LOADS, 1).packed(), "sent LOADS, which is not for rank 0"),
        (Message(Kind.FACTS, 3, b"{}").packed(), "sent facts for meeting 3, here is 1"),
        (Message(Kind.FACTS, 1, b"{").packed(), "sent facts that are no JSON"),
        (Message(Kind.ABORTED, 1, b"ab").packed(), "sent ABORTED that names no rank"),
        (messages.about_rank(Kind.ABORTED, 0, 0, "x").packed(), "sent that rank 0 aborts round 0"),
        (messages.about_rank(Kind.LOST, 0, 7, "x").packed(), "sent LOST of rank 7 of 2"),
        (messages.load(1, SOME).packed()[:7], "ended its control link inside of a message"),
    ],
)
def test_rank_0_names_the_rank_that_sends_what_it_must_not(
    rank_0: Pair, sent: bytes, why: str
) -> None:
    rank_0.socket.sendall(sent)
    rank_0.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(RankLost, match="rank 1 is lost: ") as lost:
        rank_0.group.agree(SOME)
    assert why in str(lost.value)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\0" * 40, "sent bytes that are no message"),
        (Message(Kind.LOADS, 1, b"").packed(), "sent loads of 0 bytes"),
        (Message(Kind.LOAD, 1).packed(), "sent LOAD, which rank 0 does not send"),
        (messages.depth(Kind.DEPTHS, 1, 1, 1).packed(), "sent DEPTHS number 1"),
    ],
)
def test_a_rank_names_rank_0_where_that_sends_what_it_must_not(
    rank_1: Pair, sent: bytes, why: str
) -> None:
    with ThreadPoolExecutor(1) as steps:
        agreed = steps.submit(rank_1.group.agree, SOME)
        rank_1.socket.recv(1)  # it has begun
        rank_1.socket.sendall(sent)
        with pytest.raises(RankLost, match="rank 0 is lost: ") as lost:
            agreed.result()
    assert why in str(lost.value)


@pytest.mark.parametrize("waits", ["agree", "agree_depth"])
def test_a_thread_that_waits_wakes_where_another_one_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """By itself it would look again in an hour."""
    monkeypatch.setattr(group, "LOOK_S", 3_600.0)
    with closing(Pair(0, timeout_s=3_600.0)) as rank_0, ThreadPoolExecutor(1) as steps:
        one = rank_0.group
        if waits == "agree_depth":
            rank_0.send(messages.load(1, SOME))
            one.agree(SOME)
            waiting = steps.submit(one.agree_depth, 1)
        else:
            waiting = steps.submit(one.agree, SOME)
        reading = one._reading  # pyright: ignore[reportPrivateUsage]
        eventually(reading.locked, lambda: "it does not wait")
        with pytest.raises(RankLost, match="rank 1 is lost: exchange 7"):
            one.accuse(RankLost(1, "exchange 7, 60.0 s"))
        with pytest.raises(RankLost, match="rank 1 is lost: exchange 7"):
            waiting.result(60)


def test_a_load_that_comes_byte_by_byte_is_one_load(rank_0: Pair) -> None:
    for byte in messages.load(1, NONE).packed():
        rank_0.socket.sendall(bytes([byte]))
    assert rank_0.group.agree(SOME) == [SOME, NONE]


def test_what_is_said_of_a_lost_rank_is_what_rank_0_says(rank_1: Pair) -> None:
    rank_1.send(messages.about_rank(Kind.LOST, 0, 0, "as rank 0 says"))
    with pytest.raises(RankLost, match="rank 0 is lost: as rank 0 says"):
        rank_1.group.agree(SOME)

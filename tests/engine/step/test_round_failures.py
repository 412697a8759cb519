"""What a failure on one rank costs: its own step, and those of other ranks only where they wait for its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind
from helpers.engine.drafting_engine import a_submit, plain
from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.ranks.toy_ranks import HeardOnRank, MeetingToy, rank_engine, step_to_sleep

Break = Callable[[Engine, MeetingToy], None]
BROKEN = 1


def once(owner: Any, name: str) -> None:
    """The next call of a method fails."""
    method = getattr(owner, name)

    def fails(*_: object, **__: object) -> Any:
        setattr(owner, name, method)
        raise OSError("no memory")

    setattr(owner, name, fails)


def before_agreement(engine: Engine, _: MeetingToy) -> None:
    once(engine._forward, "_batch_row")


def before_forward(_: Engine, model: MeetingToy) -> None:
    model.fail_next = OSError("no memory")


def inside_of_forward(_: Engine, model: MeetingToy) -> None:
    model.member.fail_at["forward"] = OSError("no memory")


def in_sampling(engine: Engine, _: MeetingToy) -> None:
    once(engine._forward._sampler, "sample")


def in_a_draft(_: Engine, model: MeetingToy) -> None:
    model.member.fail_at["draft"] = OSError("no memory")


def in_the_agreement_on_passes(_: Engine, model: MeetingToy) -> None:
    model.member.fail_at["depth"] = OSError("no memory")


def after_the_last_draft(engine: Engine, _: MeetingToy) -> None:
    drafter = engine._forward.drafter
    assert drafter is not None
    draft = drafter._draft

    def fails_at_its_end(known: Any) -> bool:
        drafter._draft = draft  # type: ignore[method-assign]
        draft(known)
        raise OSError("no memory")

    drafter._draft = fails_at_its_end  # type: ignore[method-assign]


def run(k: int, breaks: Break, *, idle: bool = False) -> list[HeardOnRank]:
    """Three ranks, of which one fails in its second step. Then all of them get another request."""

    def work(member: Member) -> HeardOnRank:
        engine, model = rank_engine(member, k=k)
        heard = HeardOnRank()
        if not (idle and member.rank == BROKEN):
            engine.submit(a_submit(10 + member.rank))
        heard.hear(engine.step())
        if member.rank == BROKEN:
            breaks(engine, model)
        heard.hear(engine.step())
        engine.check()
        engine.submit(a_submit(20 + member.rank))
        step_to_sleep(engine, heard)
        return heard

    group = ThreadGroup(3)
    heard = group.run(work)
    for rank, it in enumerate(heard):
        assert it.ids(20 + rank) == plain(a_submit(20 + rank))[0]
    return heard


CONCERNS_ALL = [
    (0, before_forward),
    (0, inside_of_forward),
    (2, inside_of_forward),
    (2, in_sampling),
    (2, in_the_agreement_on_passes),
    (2, in_a_draft),
]
CONCERNS_ONE = [
    (0, before_agreement),
    (2, before_agreement),
    (0, in_sampling),
    (2, after_the_last_draft),
]


@pytest.mark.parametrize(("k", "breaks"), CONCERNS_ALL)
def test_a_failure_inside_of_a_round_ends_the_step_of_all_ranks(k: int, breaks: Break) -> None:
    heard = run(k, breaks)
    texts = {rank: it.failed[10 + rank].message for rank, it in enumerate(heard)}
    ended = "the step ended, as in this worker's group rank 1 failed: OSError: no memory"
    assert texts == {0: ended, 1: "the step failed: OSError: no memory", 2: ended}
    # Routers place them again.
    assert all(it.failed[10 + rank].kind is FailureKind.ENGINE for rank, it in enumerate(heard))


@pytest.mark.parametrize(("k", "breaks"), CONCERNS_ONE)
def test_a_failure_that_no_rank_waits_for_ends_one_step(k: int, breaks: Break) -> None:
    heard = run(k, breaks)
    assert heard[BROKEN].failed[10 + BROKEN].message == "the step failed: OSError: no memory"
    for rank in (0, 2):
        assert not heard[rank].failed
        assert heard[rank].ids(10 + rank) == plain(a_submit(10 + rank))[0]


@pytest.mark.parametrize("breaks", [inside_of_forward, in_a_draft])
def test_a_rank_that_fails_without_rows_ends_the_steps_of_the_others(breaks: Break) -> None:
    heard = run(2, breaks, idle=True)
    assert not heard[BROKEN].failed
    assert all("rank 1 failed: OSError" in heard[rank].failed[10 + rank].message for rank in (0, 2))


def test_a_lost_rank_ends_the_group() -> None:
    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(member, k=1)
        heard = HeardOnRank()
        engine.submit(a_submit(member.rank))
        heard.hear(engine.step())
        if member.rank == BROKEN:
            member.leave()
            return heard
        step_to_sleep(engine, heard)
        assert engine.rounds is not None
        assert engine.rounds.lost is not None
        assert engine.rounds.lost.rank == BROKEN
        assert engine.rounds.over
        heard.hear(engine.step())  # nothing hangs
        return heard

    heard = ThreadGroup(3).run(work)
    for rank in (0, 2):
        assert "rank 1 is lost" in heard[rank].failed[rank].message

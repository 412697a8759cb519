"""Engines of a group: each pass of a rank is one of all ranks, whatever each of them has to compute."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.sequence import Key
from headrace.wire.frames import Submit
from helpers.engine.drafting_engine import a_submit, make_engine, plain
from helpers.engine.pair import legs_of, move
from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.ranks.toy_ranks import HeardOnRank, StepsAhead, rank_engine, step_to_sleep


def requests_of(rank: int, count: int, *, max_tokens: int = 24) -> list[Submit]:
    return [a_submit(100 * rank + i, prompt=5 + 4 * i, max_tokens=max_tokens) for i in range(count)]


@pytest.mark.parametrize("counts", [[3, 0], [1, 3, 0, 2]])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_answers_are_those_of_one_engine(k: int, counts: list[int]) -> None:
    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(member, k=k)
        heard = HeardOnRank()
        for submit in requests_of(member.rank, counts[member.rank]):
            engine.submit(submit)
        step_to_sleep(engine, heard)
        return heard

    group = ThreadGroup(len(counts))
    for rank, heard in enumerate(group.run(work)):
        for submit in requests_of(rank, counts[rank]):
            ids, _, finish = plain(submit)
            assert (heard.ids(submit.request), heard.finish(submit.request)) == (ids, finish)
    assert all(member.counts == group.members[0].counts for member in group.members)


def test_a_rank_without_requests_tells_of_no_step() -> None:
    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(member, k=2)
        heard = HeardOnRank()
        if member.rank == 0:
            engine.submit(a_submit(1))
        step_to_sleep(engine, heard)
        return heard

    working, idle = ThreadGroup(2).run(work)
    assert working.results[-1].step > 3
    assert {result.step for result in idle.results} == {0}
    assert not any(result.answers for result in idle.results)


def test_a_step_says_how_long_it_waited_for_other_ranks() -> None:
    def work(member: Member) -> HeardOnRank:
        engine, model = rank_engine(member)
        heard = HeardOnRank()
        engine.submit(a_submit(member.rank, max_tokens=2))
        exchange = member.exchange

        def waits(what: str) -> None:
            exchange(what)
            member.waited_s += 0.25

        model.member.exchange = waits  # type: ignore[method-assign]
        step_to_sleep(engine, heard)
        return heard

    for heard in ThreadGroup(2).run(work):
        assert [result.waited_us for result in heard.results] == [500_000, 500_000, 0]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_sequence_that_comes_with_its_kv_drafts_in_a_round_of_all(fixed: bool) -> None:
    submit = a_submit(7, prompt=9)
    prefill, _ = make_engine(3, agreement=0.6)
    legs = legs_of(submit, 1, 7)
    prefill.submit(legs[0])
    first: list[int] = []
    while not prefill.idle:
        for answers in prefill.step().answers.values():
            first += [token for output in answers.outputs for token in output.ids]
    [export] = prefill.kv_exports.take()

    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(member, k=3, fixed=fixed)
        heard = HeardOnRank()
        if member.rank == 1:
            engine.submit(legs[1])
            engine.kv_imports.ticket(Key(0, 7), b"t")
            heard.hear(engine.step())
            [pull] = engine.kv_imports.take_pulls()
            move(prefill, export, engine, pull)
            engine.kv_imports.ended(Key(0, 7), arrived=True)
            engine.go_on(Key(0, 7), first)
        else:
            engine.submit(a_submit(1))
            heard.hear(engine.step())
        step_to_sleep(engine, heard)
        return heard

    group = ThreadGroup(3)
    _, decoded, _ = group.run(work)
    assert first + decoded.ids(7) == plain(submit)[0]
    assert [load.drafts_first for load in group.members[0].loads[1]] == [False, True, False]
    assert all(member.counts == group.members[0].counts for member in group.members)


class Script:
    """What one rank does between its steps, drawn from a seed."""

    def __init__(self, rank: int, seed: int, *, rounds: int) -> None:
        draw = random.Random(f"{seed} {rank}")
        self.submits: dict[int, list[Submit]] = {}
        self.cancels: dict[int, list[int]] = {}
        eager = draw.choice([0.0, 0.1, 0.5])
        for number in range(rounds):
            if draw.random() < eager:
                request = 1000 * rank + number
                submit = a_submit(
                    request, prompt=draw.randint(1, 40), max_tokens=draw.randint(1, 20)
                )
                self.submits.setdefault(number, []).append(submit)
                if draw.random() < 0.3:
                    at = number + draw.randint(0, 6)
                    self.cancels.setdefault(at, []).append(request)

    @property
    def cancelled(self) -> set[int]:
        return {request for requests in self.cancels.values() for request in requests}


def follow(
    engine: Engine,
    heard: HeardOnRank,
    script: Script,
    rounds: int,
    step: Callable[[], StepResult],
) -> None:
    for number in range(rounds):
        for submit in script.submits.get(number, []):
            engine.submit(submit)
        for request in script.cancels.get(number, []):
            engine.cancel(Key(0, request))
        heard.hear(step())
        engine.check()
    step_to_sleep(engine, heard, step=step)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(2, 4),
    k=st.integers(0, 3),
    fixed=st.booleans(),
    rejection=st.booleans(),
    blocks=st.sampled_from([16, 64]),
    wait=st.sampled_from([0, 0, 1, 5]),
    ahead=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_all_ranks_run_the_same_passes(
    ranks: int,
    k: int,
    fixed: bool,
    rejection: bool,
    blocks: int,
    wait: int,
    ahead: bool,
    seed: int,
) -> None:
    rounds = 30
    scripts = [Script(rank, seed, rounds=rounds) for rank in range(ranks)]

    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(
            member,
            k=k,
            fixed=fixed,
            rejection=rejection,
            blocks=blocks,
            sequences=4,
            batched=12 + 4 * member.rank,
            agreement=0.3 * member.rank,
            prompt_wait_rounds=wait,
            reads_late=k == 0 and ahead,
        )
        heard = HeardOnRank()
        step = StepsAhead(engine).step if ahead else engine.step
        follow(engine, heard, scripts[member.rank], rounds, step)
        return heard

    group = ThreadGroup(ranks)
    for script, heard in zip(scripts, group.run(work), strict=True):
        assert not heard.failed
        for submit in (it for submits in script.submits.values() for it in submits):
            if submit.request not in script.cancelled and not (k and rejection):
                assert heard.ids(submit.request) == plain(submit)[0]
    first = group.members[0]
    assert all(member.counts == first.counts for member in group.members)
    assert all(member.loads == first.loads for member in group.members)


class Between:
    """Due in some rounds, and notes those in which it ran."""

    def __init__(self, member: Member, due: set[int]) -> None:
        self.rounds: list[int] = []
        self._member, self._due = member, due

    def due(self, round_number: int) -> bool:
        return round_number in self._due

    def run(self) -> None:
        self._member.exchange("between")
        self.rounds.append(self._member.number)


def test_what_is_due_on_one_rank_all_do_before_the_passes() -> None:
    def work(member: Member) -> list[int]:
        engine, _ = rank_engine(member)
        between = Between(member, {1: {2}, 2: {3, 4}}.get(member.rank, set()))
        assert engine.rounds is not None
        engine.rounds.between = between
        heard = HeardOnRank()
        if member.rank == 0:
            engine.submit(a_submit(1))
        step_to_sleep(engine, heard)
        assert heard.ids(1) == (plain(a_submit(1))[0] if member.rank == 0 else [])
        return between.rounds

    assert ThreadGroup(3).run(work) == [[2, 3, 4]] * 3

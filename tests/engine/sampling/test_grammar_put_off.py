"""A step without the work for all masks: some answers get no token in it, and every text is the same.

With no work at all a step fills the mask of one answer, whichever has waited longest.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.sampling import grammar
from headrace.engine.sequence import Key
from headrace.wire.frames import Grammar, Reasoning, Sampling, Submit
from helpers.engine.drafting_engine import Heard as Link
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.drafting_engine import run
from helpers.engine.pair import Heard, split, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, GRAMMARS, JSON, WORDS, follows, toy_vocabulary
from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.ranks.toy_ranks import HeardOnRank, StepsAhead, rank_engine, step_to_sleep

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NAMES = [*GRAMMARS]


def an_engine(**more: Any) -> Engine:
    return engine_on(ToyModel(), vocabulary=toy_vocabulary(), **more)


def a_submit(request: int, grammar: Grammar, *, max_tokens: int = 60, **more: Any) -> Submit:
    sampling = follows(grammar, **{"seed": request, **more})
    return make_submit(request, PROMPT, max_tokens=max_tokens, sampling=sampling, stop_ids=[END])


def answered(heard: Heard) -> tuple[list[int], str | None]:
    assert heard.failed is None, heard.failed
    return heard.ids, heard.finish


def several(**more: Any) -> list[Submit]:
    return [a_submit(seed, GRAMMARS[NAMES[seed % 4]], **more) for seed in range(8)]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "WORK_BESIDE", 0)
    monkeypatch.setattr(grammar, "WORK_LATE", 0)


WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"logprobs": 2}, {"top_k": 5}]


@pytest.mark.parametrize("more", WAYS)
def test_texts_and_log_probabilities_are_those_of_steps_that_wait(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [unsplit(an_engine(), submit) for submit in several(**more)]
    monkeypatch.setattr(grammar, "WORK_BESIDE", 0)
    monkeypatch.setattr(grammar, "WORK_LATE", 0)
    engine = an_engine(sequences=8)
    for submit in several(**more):
        engine.submit(submit)
    heard = run(engine)
    for submit, want in zip(several(**more), alone, strict=True):
        got = (heard.ids(submit.request), heard.finish(submit.request))
        assert got == answered(want)
        if "logprobs" in more:
            assert heard.logprobs(submit.request) == want.logprobs
    assert engine.grammar_totals.put_off > 0
    assert engine.empty
    engine.check()


@pytest.mark.usefixtures("no_work")
def test_each_step_serves_whoever_has_waited_longest() -> None:
    engine = an_engine(sequences=8, prefix_cache=False)
    for seed in range(3):
        engine.submit(a_submit(seed, JSON))
    turns: list[int] = []
    while len(turns) < 12:
        new = [output.request for output in engine.step().of(0).outputs if output.ids]
        assert len(new) <= 1
        turns += new
    assert all({*turns[at : at + 3]} == {0, 1, 2} for at in range(10)), turns


@pytest.mark.usefixtures("no_work")
def test_answers_without_a_grammar_get_a_token_in_every_step() -> None:
    engine = an_engine(sequences=8)
    plain = make_submit(50, PROMPT, max_tokens=20, sampling=Sampling(seed=3, temperature=1.0))
    for submit in [*several(), plain]:
        engine.submit(submit)
    got: list[int] = []
    while len(got) < 20:
        outputs = {output.request: output.ids for output in engine.step().of(0).outputs}
        if got or 50 in outputs:
            assert len(outputs[50]) == 1
            got += outputs[50]
    assert got == unsplit(an_engine(), plain).ids


def overlapped(engine: Engine) -> Link:
    """Each step is planned before the one before it has run."""
    heard, step = Link(), engine.steps.begin()
    while step is not None:
        following = engine.steps.begin() if engine.steps.may_begin and not engine.idle else None
        step.run()
        step.read()
        heard.hear(engine.steps.finish(step))
        engine.check()
        step = following or (None if engine.idle else engine.steps.begin())
    return heard


@pytest.mark.usefixtures("no_work")
def test_neither_preemption_nor_overlapping_steps_change_an_answer() -> None:
    alone = [answered(unsplit(an_engine(), submit)) for submit in several()]
    engine = an_engine(blocks=24, sequences=8, prefix_cache=False)
    for submit in several():
        engine.submit(submit)
    heard = overlapped(engine)
    assert engine.stages.preemptions > 0
    assert engine.grammar_totals.put_off > 0
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in several()] == alone


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_drafts_change_no_answer(agreement: float, *, rejection: bool) -> None:
    alone = [answered(unsplit(an_engine(), submit)) for submit in several()]
    engine, _ = drafting_engine(
        3, agreement=agreement, rejection=rejection, vocabulary=toy_vocabulary()
    )
    for submit in several():
        engine.submit(submit)
    heard = run(engine)
    assert engine.grammar_totals.put_off > 0
    for submit, (ids, finish) in zip(several(), alone, strict=True):
        if rejection:
            assert heard.finish(submit.request) in ("stop", "length")
        else:
            assert (heard.ids(submit.request), heard.finish(submit.request)) == (ids, finish)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", GRAMMARS)
def test_an_answer_that_is_handed_off_or_resumed_goes_on_the_same(name: str) -> None:
    submit = a_submit(4, GRAMMARS[name], max_tokens=30)
    whole = unsplit(an_engine(), submit)
    for prefill, decode in itertools.product((an_engine(), crowded()), (an_engine(), crowded())):
        assert answered(split(prefill, decode, submit)) == answered(whole)
    for at in range(1, len(whole.ids)):
        resume = make_submit(0, [1], resumed=whole.ids[:at]).resume
        again = unsplit(crowded(), replace(submit, resume=resume))
        assert whole.ids[:at] + again.ids == whole.ids
        assert again.finish == whole.finish


def crowded() -> Engine:
    """Others with a grammar take the turns of whoever comes."""
    engine = an_engine(blocks=400, sequences=8)
    for request in range(10_000, 10_004):
        engine.submit(a_submit(request, JSON, max_tokens=150))
    for _ in range(4):
        engine.step()
    return engine


@pytest.mark.usefixtures("no_work")
def test_who_is_cancelled_while_it_is_put_off_leaves_no_trace() -> None:
    engine = an_engine(sequences=8)
    for submit in several():
        engine.submit(submit)
    for request in range(7):
        engine.step()
        engine.cancel(Key(0, request))
    heard = run(engine)
    assert (heard.ids(7), heard.finish(7)) == answered(unsplit(an_engine(), several()[7]))
    assert engine.empty
    engine.check()
    engine.check_idle()


@pytest.mark.usefixtures("no_work")
def test_many_tokens_that_come_at_once_are_taken_step_by_step() -> None:
    """64 in each step, where nobody else has a turn."""
    words = Grammar(GRAMMARS["regex"].kind, "[a-z]{220,230}")
    submit = a_submit(1, words, max_tokens=240)
    whole = unsplit(an_engine(), submit)
    assert len(whole.ids) > 200
    resume = make_submit(0, [1], resumed=whole.ids[:200]).resume
    engine = an_engine()
    again = unsplit(engine, replace(submit, resume=resume))
    assert whole.ids[:200] + again.ids == whole.ids
    assert engine.grammar_totals.put_off == 4, "64, 128, 192, 200, and the mask in the next"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("most", [0, 3, None])
def test_a_budget_of_reasoning_counts_tokens_and_no_steps(most: int | None) -> None:
    close = [WORDS.index("c"), WORDS.index("l")]
    submits = [
        replace(
            submit,
            sampling=replace(submit.sampling, reasoning=Reasoning([], close, most)),
        )
        for submit in several()
    ]
    alone = [answered(unsplit(an_engine(), submit)) for submit in submits]
    engine = an_engine(sequences=8)
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in submits] == alone


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("reads_late", [False, True])
def test_ranks_in_lockstep_keep_their_rounds_and_their_answers(k: int, *, reads_late: bool) -> None:
    """One rank puts off, one has no grammar at all, one has nothing to do."""
    plain = [
        make_submit(50 + i, PROMPT, max_tokens=9 + i, sampling=Sampling(seed=i, temperature=1.0))
        for i in range(2)
    ]
    of_rank: list[list[Submit]] = [several(), plain, []]

    def work(member: Member) -> tuple[HeardOnRank, int]:
        engine, _ = rank_engine(member, k=k, reads_late=reads_late, vocabulary=toy_vocabulary())
        heard = HeardOnRank()
        for submit in of_rank[member.rank]:
            engine.submit(submit)
        step_to_sleep(engine, heard, step=StepsAhead(engine).step if reads_late else None)
        return heard, engine.grammar_totals.put_off

    group = ThreadGroup(3)
    for submits, (heard, put_off) in zip(of_rank, group.run(work), strict=True):
        assert (put_off > 0) == (submits == of_rank[0])
        for submit in submits:
            got = (heard.ids(submit.request), heard.finish(submit.request))
            assert got == answered(unsplit(an_engine(), submit))
    assert all(member.counts == group.members[0].counts for member in group.members)

"""Reasoning before an answer: a grammar begins behind it, and a budget ends it; on a model whose logits are random."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.wire.frames import Grammar, Ranked, Reasoning, Sampling, Submit
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.drafting_engine import run
from helpers.engine.pair import Heard, split, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, JSON, REGEX, SCHEMA, WORDS, text_of, toy_vocabulary

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
OPEN, CLOSE = [WORDS.index("o"), WORDS.index("p")], [WORDS.index("c"), WORDS.index("l")]
BUDGETS = [None, 0, 1, 7]
WAYS = list(itertools.product([[], OPEN[:1], OPEN], BUDGETS))


def an_engine(**more: Any) -> Engine:
    return engine_on(ToyModel(), vocabulary=toy_vocabulary(), **more)


def a_submit(
    request: int,
    begin: list[int],
    max_tokens: int | None,
    grammar: Grammar | None = None,
    *,
    longest: int = 60,
    **more: Any,
) -> Submit:
    reasoning = Reasoning(begin, CLOSE, max_tokens)
    sampling = Sampling(temperature=1.3, seed=request, grammar=grammar, reasoning=reasoning)
    return make_submit(
        request, PROMPT, max_tokens=longest, sampling=replace(sampling, **more), stop_ids=[END]
    )


def parts(ids: list[int], begin: list[int]) -> tuple[list[int] | None, list[int] | None]:
    """What was reasoned, and what was answered; `None` where there is nothing of it."""
    if ids[: len(begin)] != begin:
        return None, ids
    rest = ids[len(begin) :]
    for at in range(len(rest) - len(CLOSE) + 1):
        if rest[at : at + len(CLOSE)] == CLOSE:
            return rest[:at], rest[at + len(CLOSE) :]
    return rest, None


def answered(heard: Heard) -> tuple[list[int], str | None]:
    assert heard.failed is None, heard.failed
    return heard.ids, heard.finish


@pytest.mark.parametrize(("begin", "most"), WAYS)
@pytest.mark.parametrize("grammar", [None, JSON])
def test_reasoning_keeps_to_its_budget_and_answers_to_the_grammar(
    begin: list[int], most: int | None, grammar: Grammar | None
) -> None:
    engine = an_engine(sequences=8)
    for seed in range(24):
        # Without a budget only a chance finds the marker: it is made likely.
        bias = [] if most is not None else [Ranked(token, 4.0) for token in CLOSE]
        submit = a_submit(seed, begin, most, grammar, longest=150)
        sampling = replace(submit.sampling, logit_bias=bias)
        engine.submit(replace(submit, sampling=sampling))
    heard = run(engine)
    reasoned_once = finished = 0
    for seed in range(24):
        ids, finish = heard.ids(seed), heard.finish(seed)
        reasoned, answer = parts(ids, begin)
        reasoned_once += reasoned is not None
        if most is not None and reasoned is not None:
            assert answer is None or len(reasoned) <= most
            assert answer is not None or (grammar is None and finish == "stop")
        if grammar is not None and finish == "stop":
            assert answer is not None, "no end of the answer before its grammar has begun"
            jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
            finished += 1
    assert reasoned_once or begin == OPEN
    assert finished or grammar is None


def test_a_budget_without_a_grammar_forces_the_marker_and_nothing_else() -> None:
    heard = unsplit(an_engine(), a_submit(1, [], 5, ignore_eos=True, longest=20))
    free = unsplit(an_engine(), replace(a_submit(1, [], None, ignore_eos=True, longest=20)))
    assert heard.ids[:5] == free.ids[:5]
    assert heard.ids[5:7] == CLOSE
    assert len(heard.ids) == 20


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize(("begin", "most"), WAYS)
def test_an_answer_cut_at_every_token_goes_on_the_same(
    begin: list[int], most: int | None, temperature: float
) -> None:
    submit = a_submit(4, begin, most, REGEX, temperature=temperature, longest=30)
    whole = unsplit(an_engine(), submit)
    assert len(whole.ids) > 1
    for at in range(1, len(whole.ids)):
        resume = make_submit(0, [1], resumed=whole.ids[:at]).resume
        rest = replace(submit, resume=resume)
        for again in (unsplit(an_engine(), rest), split(an_engine(), an_engine(), rest)):
            assert (whole.ids[:at] + again.ids, again.finish) == (whole.ids, whole.finish)
    assert answered(split(an_engine(), an_engine(), submit)) == answered(whole)


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("grammar", [None, REGEX])
def test_drafts_change_no_answer(agreement: float, grammar: Grammar | None) -> None:
    submits = [a_submit(seed, begin, most, grammar) for seed, (begin, most) in enumerate(WAYS * 2)]
    alone = [answered(unsplit(an_engine(), submit)) for submit in submits]
    engine, _ = drafting_engine(3, agreement=agreement, vocabulary=toy_vocabulary())
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in submits] == alone


def test_drafts_checked_by_rejection_keep_to_the_budget() -> None:
    engine, _ = drafting_engine(3, agreement=0.8, rejection=True, vocabulary=toy_vocabulary())
    for seed in range(16):
        engine.submit(a_submit(seed, [], 5, REGEX))
    heard = run(engine)
    for seed in range(16):
        reasoned, answer = parts(heard.ids(seed), [])
        assert reasoned is not None
        assert answer is not None
        assert len(reasoned) <= 5


def test_preemption_changes_no_answer() -> None:
    submits = [a_submit(seed, begin, most, REGEX) for seed, (begin, most) in enumerate(WAYS * 2)]
    alone = [answered(unsplit(an_engine(), submit)) for submit in submits]
    engine = an_engine(blocks=30, sequences=8, prefix_cache=False)
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert engine.stages.preemptions > 0
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in submits] == alone


def test_a_marker_of_other_tokens_is_refused() -> None:
    engine = an_engine()
    submit = a_submit(1, [], None)
    for reasoning in (Reasoning([50], CLOSE), Reasoning([], [3, 50])):
        wrong = replace(submit, sampling=replace(submit.sampling, reasoning=reasoning))
        with pytest.raises(RequestError, match="token 50") as refused:
            engine.submit(wrong)
        assert refused.value.kind is FailureKind.BAD_TOKEN
    assert engine.empty


def test_a_budget_needs_no_vocabulary() -> None:
    heard = unsplit(engine_on(ToyModel()), a_submit(1, [], 3, ignore_eos=True, longest=8))
    assert heard.ids[3:5] == CLOSE

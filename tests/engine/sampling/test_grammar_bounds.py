"""A grammar that meets a bound in mid-answer: its request fails by the kind `grammar`, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind
from headrace.wire.frames import Sampling, Submit
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.hearing import Heard, run
from helpers.engine.pair import split, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import (
    END,
    GRAMMARS,
    follows,
    text_of,
    too_ambiguous,
    toy_vocabulary,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
OTHERS = range(10, 16)


def an_engine(**more: Any) -> Engine:
    return engine_on(ToyModel(), vocabulary=toy_vocabulary(), **more)


def bounded(request: int, **more: Any) -> Submit:
    sampling = follows(too_ambiguous(), seed=request, **more)
    return make_submit(request, PROMPT, max_tokens=60, sampling=sampling, stop_ids=[END])


def others() -> list[Submit]:
    names = [*GRAMMARS]
    return [
        make_submit(
            request,
            PROMPT,
            max_tokens=40,
            sampling=Sampling(temperature=1.0, seed=request)
            if request % 2
            else follows(GRAMMARS[names[request % len(names)]], seed=request),
            stop_ids=[END],
        )
        for request in OTHERS
    ]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"top_k": 5}, {"logprobs": 2}])
def test_the_request_fails_by_kind_and_others_go_on_as_without_it(more: dict[str, Any]) -> None:
    engine, alone = an_engine(sequences=12), an_engine(sequences=12)
    for submit in others():
        engine.submit(submit)
        alone.submit(submit)
    engine.submit(bounded(1, **more))
    heard, want = run(engine), run(alone)
    failed = heard.failed.pop(1)
    assert failed.kind is FailureKind.GRAMMAR
    assert failed.message.startswith("no token can go on under the grammar: ")
    assert "\n" not in failed.message
    text = text_of(heard.ids.pop(1))
    assert text.startswith("xa"), "in mid-answer"
    assert set(text[1:]) == {"a"}
    assert 1 not in heard.finish
    assert not heard.failed
    assert (heard.ids, heard.finish) == (want.ids, want.finish)
    assert engine.empty


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_drafts_reach_the_bound_no_sooner(agreement: float, rejection: bool) -> None:
    """What a bound forbids behind a draft may never be asked for."""
    want = run_out_one(an_engine(), bounded(1))
    engine, _ = drafting_engine(
        3, agreement=agreement, rejection=rejection, vocabulary=toy_vocabulary()
    )
    heard = run_out_one(engine, bounded(1))
    assert heard.failed[1] == want.failed[1]
    assert text_of(heard.ids[1]) == text_of(want.ids[1])


def run_out_one(engine: Engine, submit: Submit) -> Heard:
    engine.submit(submit)
    return run(engine)


def test_a_request_that_is_handed_off_fails_alike() -> None:
    want = unsplit(an_engine(), bounded(1))
    heard = split(an_engine(), an_engine(), bounded(1))
    assert want.failed is not None
    assert heard.failed is not None
    assert (heard.ids, heard.failed.kind) == (want.ids, want.failed.kind)


def test_a_resumed_answer_meets_it_at_the_same_place() -> None:
    want = unsplit(an_engine(), bounded(1))
    assert want.failed is not None
    for at in range(1, len(want.ids) + 1):
        resume = make_submit(0, [1], resumed=want.ids[:at]).resume
        heard = unsplit(an_engine(), replace(bounded(1), resume=resume))
        assert heard.failed is not None
        assert want.ids[:at] + heard.ids == want.ids
        assert heard.failed.kind is want.failed.kind

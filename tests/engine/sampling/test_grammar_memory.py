"""The memory of all grammars and of the answers that follow them: counted, given back, and bounded."""

from __future__ import annotations

import pytest

from headrace._core import GrammarVocabulary
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.wire.frames import Grammar, GrammarKind, Submit
from helpers.engine.hearing import run
from helpers.engine.pair import unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, WORDS, follows, toy_vocabulary
from helpers.serving.server import eventually

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SMALL = Grammar(GrammarKind.REGEX, "[a-f]{3,60}")
LARGE = Grammar(GrammarKind.REGEX, "([a-z]{1,40}[0-9]{1,40}[,:.]){1,40}")


def vocabulary(memory_bytes: int) -> GrammarVocabulary:
    words = [*(word.encode() for word in WORDS), b"\xffend"]
    return GrammarVocabulary.of_tokens(words, [END], memory_bytes=memory_bytes)


def an_engine(known: GrammarVocabulary) -> Engine:
    return engine_on(ToyModel(), vocabulary=known)


def a_submit(request: int, grammar: Grammar, max_tokens: int = 40) -> Submit:
    sampling = follows(grammar, seed=request)
    return make_submit(request, PROMPT, max_tokens=max_tokens, sampling=sampling, stop_ids=[END])


def test_what_answers_hold_is_given_back_when_they_end_or_are_cancelled() -> None:
    known = vocabulary(0)
    engine = an_engine(known)
    engine.submit(a_submit(1, SMALL))
    engine.submit(a_submit(2, LARGE, max_tokens=100))
    compiled = known.memory_bytes
    engine.step()
    running = engine.grammar_totals.memory_bytes
    assert running > compiled > 0
    run(engine)
    kept = known.memory_bytes  # the thread of masks may hold an answer that has ended
    assert kept < running + 2_000_000
    alone = an_engine(known)
    alone.submit(a_submit(3, SMALL, max_tokens=3))
    run(alone)
    # the toy answers have ended: nothing is held but what the grammars learned, once the thread of masks lets go
    eventually(lambda: known.memory_bytes <= kept + 1000, lambda: f"{known.memory_bytes} of {kept}")


def test_a_grammar_is_refused_while_those_in_use_hold_too_much_and_taken_later() -> None:
    free = vocabulary(0)
    engine = an_engine(free)
    engine.submit(a_submit(1, SMALL, max_tokens=60))
    engine.step()
    limit = free.memory_bytes * 5 // 4  # of which an answer is more than three quarters
    known = vocabulary(limit)
    engine = an_engine(known)
    engine.submit(a_submit(1, SMALL, max_tokens=60))
    engine.step()
    with pytest.raises(RequestError) as refused:
        engine.submit(a_submit(2, LARGE))
    assert refused.value.kind is FailureKind.QUEUE_FULL, "another worker may have room"
    assert "try again when answers have ended" in str(refused.value)
    assert engine.grammar_totals.refused == 1
    engine.submit(a_submit(3, SMALL))  # it is there
    run(engine)
    del engine  # and what its thread holds of answers that have ended
    eventually(lambda: known.memory_bytes < limit * 3 // 4, lambda: f"{known.memory_bytes}")
    fresh = an_engine(known)
    fresh.submit(a_submit(2, Grammar(GrammarKind.REGEX, "[a-c]{1,5}")))
    heard = run(fresh)
    assert heard.finish[2] in ("stop", "length")
    assert not known.knows(SMALL.kind, SMALL.source), "it gave way, as no answer has it"


def test_preparing_refuses_as_well_and_is_not_counted_twice() -> None:
    known = vocabulary(1)
    in_use = known.compile(SMALL.kind, SMALL.source)
    with pytest.raises(MemoryError):
        known.prepare(LARGE.kind, LARGE.source)
    assert known.refused == 0
    with pytest.raises(MemoryError, match="bytes"):
        known.compile(LARGE.kind, LARGE.source)
    assert known.refused == 1
    del in_use
    known.prepare(LARGE.kind, LARGE.source)
    assert known.knows(LARGE.kind, LARGE.source)


def test_the_largest_grammar_gives_way_and_the_others_go_on() -> None:
    known = vocabulary(0)
    free = an_engine(known)
    small, large = a_submit(1, SMALL, 60), a_submit(2, LARGE, 150)
    want = unsplit(an_engine(toy_vocabulary()), small)
    for submit in (small, large):
        free.submit(submit)
    free.step()
    begun = known.memory_bytes
    run(free)
    assert known.memory_bytes > begun - 2 * 70_000, "it has grown"
    tight = vocabulary(begun + 20_000)
    engine = an_engine(tight)
    for submit in (small, large):
        engine.submit(submit)
    heard = run(engine)
    failed = heard.failed.pop(2)
    assert failed.kind is FailureKind.GRAMMAR
    assert "memory" in failed.message
    assert not heard.failed
    assert (heard.ids[1], heard.finish[1]) == (want.ids, want.finish)
    assert engine.empty
    assert engine.cancel(Key(0, 2)) == 0

"""Answers that follow a grammar, on a model whose logits are random: only the masks make them valid."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from headrace._core import GrammarVocabulary
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits import Few, TokenIds
from headrace.engine.sampling.sampler import Sampler
from headrace.engine.sequence import Key, Sequence
from headrace.wire.frames import Grammar, GrammarKind, Ranked, Sampling, Submit
from headrace_kernels.token_masks import mask_logits, mask_logits_ref
from helpers.engine.drafting_engine import Heard as Link
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.drafting_engine import run
from helpers.engine.pair import Heard, split, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, GRAMMARS, JSON, SCHEMA, follows, text_of, toy_vocabulary

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def an_engine(**more: Any) -> Engine:
    return engine_on(ToyModel(), vocabulary=toy_vocabulary(), **more)


def a_submit(request: int, grammar: Grammar, *, max_tokens: int = 200, **more: Any) -> Submit:
    sampling = follows(grammar, **{"seed": request, **more})
    return make_submit(request, PROMPT, max_tokens=max_tokens, sampling=sampling, stop_ids=[END])


def is_valid(name: str, text: str) -> bool:
    match name:
        case "json":
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case "regex":
            return re.fullmatch(r"[a-f]{3,9}-[0-9]+(xy|true){2}", text) is not None
        case "choice":
            return text in {"yes", "no", "note"}
        case _:
            return re.fullmatch(r"\[[a-c]+:[0-9]{1,3}(,[a-c]+:[0-9]{1,3})*\]", text) is not None


def answered(heard: Heard) -> tuple[list[int], str | None]:
    assert heard.failed is None, heard.failed
    return heard.ids, heard.finish


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_finished_answer_is_valid(name: str) -> None:
    engine = an_engine(sequences=4)
    for seed in range(25):
        engine.submit(a_submit(seed, GRAMMARS[name]))
    heard = run(engine)
    finishes = [heard.finish(seed) for seed in range(25)]
    assert "stop" in finishes
    for seed, finish in enumerate(finishes):
        text = text_of(heard.ids(seed))
        if finish == "stop":
            assert is_valid(name, text), text
        else:
            assert finish == "length"
            assert len(heard.ids(seed)) == 200
    assert len({text_of(heard.ids(seed)) for seed in range(25)}) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", GRAMMARS)
def test_an_answer_cut_at_every_token_goes_on_the_same(name: str, temperature: float) -> None:
    submit = a_submit(4, GRAMMARS[name], max_tokens=40, temperature=temperature, logprobs=1)
    whole = unsplit(an_engine(), submit)
    assert len(whole.ids) > 1
    for at in range(1, len(whole.ids)):
        rest = replace(submit, resume=replace_resume(whole.ids[:at]))
        for again in (unsplit(an_engine(), rest), split(an_engine(), an_engine(), rest)):
            assert whole.ids[:at] + again.ids == whole.ids
            assert again.finish == whole.finish
            assert whole.logprobs[at:] == again.logprobs
    assert answered(split(an_engine(), an_engine(), submit)) == answered(whole)


def replace_resume(ids: list[int]) -> Any:
    submit = make_submit(0, [1], resumed=ids)
    return submit.resume


def test_neither_others_nor_preemption_change_an_answer() -> None:
    submits = [a_submit(seed, GRAMMARS[name]) for seed, name in enumerate([*GRAMMARS] * 3)]
    alone = [answered(unsplit(an_engine(), submit)) for submit in submits]
    engine = an_engine(blocks=40, sequences=8, prefix_cache=False)
    for submit in submits:
        engine.submit(submit)
    others = range(100, 108)
    for request in others:
        engine.submit(make_submit(request, PROMPT, max_tokens=30, sampling=Sampling(seed=request)))
    # For the k best of a row its mask is written out, and so are the masks of all rows beside it.
    k_best = make_submit(50, PROMPT, max_tokens=20, sampling=Sampling(temperature=1.0, top_k=5))
    engine.submit(k_best)
    heard = run(engine)
    assert engine.stages.preemptions > 0
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in submits] == alone
    plain = engine_on(ToyModel())
    for request in others:
        plain.submit(make_submit(request, PROMPT, max_tokens=30, sampling=Sampling(seed=request)))
    unconstrained = run(plain)
    for request in others:
        assert heard.ids(request) == unconstrained.ids(request)


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_drafts_change_no_answer(name: str, agreement: float) -> None:
    submits = [a_submit(seed, GRAMMARS[name]) for seed in range(8)]
    alone = [answered(unsplit(an_engine(), submit)) for submit in submits]
    engine, _ = drafting_engine(3, agreement=agreement, vocabulary=toy_vocabulary())
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert [(heard.ids(s.request), heard.finish(s.request)) for s in submits] == alone


@pytest.mark.parametrize("name", GRAMMARS)
def test_drafts_checked_by_rejection_stay_in_the_grammar(name: str) -> None:
    engine, _ = drafting_engine(3, agreement=0.7, rejection=True, vocabulary=toy_vocabulary())
    for seed in range(16):
        engine.submit(a_submit(seed, GRAMMARS[name]))
    heard = run(engine)
    for seed in range(16):
        text = text_of(heard.ids(seed))
        if heard.finish(seed) == "stop":
            assert is_valid(name, text), text


def test_what_the_grammar_has_finished_ends_the_answer() -> None:
    grammar = Grammar(GrammarKind.REGEX, "abc")
    for ignore_eos in (False, True):
        for max_tokens in (3, 50):  # also where that is the longest answer
            submit = a_submit(1, grammar, max_tokens=max_tokens, ignore_eos=ignore_eos)
            heard = unsplit(an_engine(), submit)
            assert (text_of(heard.ids), heard.finish) == ("abc", "stop")
            assert len(heard.ids) == 3
    assert unsplit(an_engine(), a_submit(1, grammar, max_tokens=2)).finish == "length"


def test_other_parameters_choose_among_what_is_allowed() -> None:
    every: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logit_bias": [Ranked(10, 1e6)]},
        {"min_tokens": 150},
        {"temperature": 0.0, "logprobs": 2},
    ]
    for more in every:
        heard = unsplit(an_engine(), a_submit(2, JSON, **more))
        assert heard.failed is None
        if heard.finish == "stop":
            assert is_valid("json", text_of(heard.ids))


def test_choices_of_other_seeds_are_other_answers() -> None:
    texts = {text_of(unsplit(an_engine(), a_submit(seed, JSON)).ids) for seed in range(6)}
    assert len(texts) > 3


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.REGEX, "("), "grammar"),
        (Grammar(GrammarKind.JSON, "{"), "grammar"),
        (Grammar(GrammarKind.JSON, '{"type": "strange"}'), "strange"),
        (Grammar(GrammarKind.LARK, "start: nothing"), "nothing"),
        (Grammar(GrammarKind.LARK, "("), "grammar"),
    ],
)
def test_a_grammar_that_is_none_is_refused(grammar: Grammar, says: str) -> None:
    engine = an_engine()
    with pytest.raises(RequestError, match=says) as refused:
        engine.submit(a_submit(1, grammar))
    assert refused.value.kind is FailureKind.BAD_SAMPLING
    assert engine.empty


def test_a_worker_without_a_vocabulary_says_so() -> None:
    with pytest.raises(RequestError) as refused:
        engine_on(ToyModel()).submit(a_submit(1, JSON))
    assert refused.value.kind is FailureKind.UNSUPPORTED


def test_a_resumed_answer_that_the_grammar_does_not_allow_fails_by_name() -> None:
    submit = replace(a_submit(1, JSON), resume=replace_resume([30, 31]))
    heard = unsplit(an_engine(), submit)
    assert heard.failed is not None
    assert "grammar" in heard.failed.message


def test_a_grammar_is_compiled_once() -> None:
    vocabulary = toy_vocabulary()
    engine = engine_on(ToyModel(), vocabulary=vocabulary)
    for seed in range(3):
        engine.submit(a_submit(seed, JSON))
    run(engine, Link())
    assert (vocabulary.compiled, vocabulary.found) == (1, 2)


def test_a_grammar_that_was_prepared_for_a_request_is_not_found_by_it() -> None:
    vocabulary = toy_vocabulary()
    for _ in range(2):
        vocabulary.prepare(JSON.kind, JSON.source)
    assert vocabulary.knows(JSON.kind, JSON.source)
    engine = engine_on(ToyModel(), vocabulary=vocabulary)
    for seed in range(3):
        engine.submit(a_submit(seed, JSON))
        totals = engine.grammar_totals
        assert (totals.compiled, totals.known) == (1, seed)
    vocabulary.prepare(GrammarKind.REGEX, "(")
    with pytest.raises(RequestError, match="grammar"):
        engine.submit(a_submit(9, Grammar(GrammarKind.REGEX, "(")))
    assert engine.grammar_totals.compiled == 2, "that it is none is known, too"


def test_the_wrong_vocabulary_is_no_vocabulary() -> None:
    with pytest.raises(ValueError, match="tokens"):
        engine_on(ToyModel(vocab_size=51), vocabulary=toy_vocabulary())
    with pytest.raises(ValueError, match="ends"):
        GrammarVocabulary.of_tokens([b"a"], [1])


@pytest.mark.parametrize("more", [{}, {"top_p": 0.7}, {"min_p": 0.2, "top_p": 0.95}])
def test_rows_of_few_tokens_are_chosen_from_as_if_the_others_were_forbidden(
    more: dict[str, Any],
) -> None:
    random = np.random.default_rng(5)
    logits = torch.randn(60, 500) * 3
    logits[::7] = logits[::7].round()  # ties
    lists = [
        np.sort(random.choice(500, count, replace=False)) for count in random.integers(1, 40, 40)
    ]
    of = np.full(60, -1)
    of[random.choice(60, 40, replace=False)] = np.arange(40)
    starts = np.cumsum([0, *map(len, lists)])
    few = Few(of, starts, np.concatenate(lists).astype(np.uint32))
    masked = logits.clone()
    for row, place in enumerate(of.tolist()):
        if place >= 0:
            forbidden = np.setdiff1d(np.arange(500), lists[place])
            masked[row, torch.from_numpy(forbidden)] = -torch.inf
    want_ids, want_best = logits_of(masked).argmax()
    ids, best = logits_of(logits).argmax(few)
    assert ids.tolist() == want_ids.tolist()
    assert best.tolist() == want_best.tolist()
    sampler = Sampler(500, 60)
    tokens = TokenIds(np.arange(500, dtype=np.int32))
    for seed in range(20):
        for row in range(60):
            sequence = a_sequence(row, Sampling(temperature=0.8, seed=seed * 60 + row, **more))
            sampler.take_row(sequence, row)
        draws = sampler.draws(best, np.arange(60), np.full(60, 9))
        want = logits_of(masked).race(draws, tokens)
        assert logits_of(logits).race(draws, tokens, few).tolist() == want.tolist()
        some = random.permutation(60)[:30]
        part = logits_of(logits).take(some, copy=True)
        assert part.race(draws.of(some), tokens, few.of_rows(some)).tolist() == want[some].tolist()


def a_sequence(row: int, sampling: Sampling) -> Sequence:
    return Sequence(
        key=Key(0, row), arrival=row, priority=0, prompt=np.array([1], dtype=np.int32), listed=[],
        limit=99, sampling=sampling, stop_ids=frozenset(), salt=b"", deadline_s=None, names=[],
    )  # fmt: skip


def test_lists_that_do_not_fit_the_logits_are_refused() -> None:
    logits = torch.zeros(2, 5)
    for of, starts, ids in [
        ([0, 1], [0, 1], [0]),
        ([0, -1], [0, 2], [0]),
        ([0, -1], [0, 1], [5]),
        ([0], [0, 1], [0]),
        ([0, -1], [1, 0], [0]),
    ]:
        few = Few(np.array(of), np.array(starts), np.array(ids, dtype=np.uint32))
        with pytest.raises(ValueError, match="few tokens of"):
            logits_of(logits).argmax(few)


@pytest.mark.parametrize("vocab", [31, 32, 33, 50, 96])
def test_masks_do_what_the_reference_does(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    masks = random.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32)
    masks[1] = 0
    masks[2] = 2**32 - 1
    logits = torch.randn(5, vocab)
    rows = np.array([0, 2, 4])
    want = logits.clone()
    mask_logits_ref(want, rows, masks)
    tensor = logits.clone()
    mask_logits(tensor, rows, masks)
    logits_of(logits).mask(rows, masks)
    assert torch.equal(logits, want)
    assert torch.equal(tensor, want)

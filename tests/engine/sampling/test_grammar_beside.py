"""A grammar beside the other parameters that decide which token comes next, and beside what goes wrong."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from headrace._core import AnswerRules, GrammarVocabulary
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind
from headrace.engine.sampling.grammar import Grammars
from headrace.wire.frames import Grammar, GrammarKind, Ranked, Sampling, Submit, TokenLimits
from helpers.engine.drafting_engine import make_engine as drafting_engine
from helpers.engine.hearing import Heard, run
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, GRAMMARS, WORDS, follows, text_of, toy_vocabulary

if TYPE_CHECKING:
    from headrace.engine.step.input_batch import AddedRow
    from headrace_kernels.batch import Batch
    from headrace_kernels.ops import Progress

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
HEX = Grammar(GrammarKind.REGEX, "[0-9a-f]{8}")
LETTERS = Grammar(GrammarKind.REGEX, "[a-c]{1,60}")
ANY = Grammar(GrammarKind.REGEX, "[a-z0-9 ]{30}")  # so many tokens that they are not listed
DIGITS = [WORDS.index(digit) for digit in "0123456789"]
# How a token is chosen: each has a way of its own through the masks.
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3},
    "of the best": {"temperature": 1.3, "top_k": 4},
    "of a share": {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
}


def an_engine(**more: Any) -> Engine:
    return engine_on(ToyModel(), vocabulary=toy_vocabulary(), **more)


def a_submit(request: int, grammar: Grammar | None, *, longest: int = 60, **more: Any) -> Submit:
    sampling = follows(grammar, **{"seed": request, **more}) if grammar else Sampling(**more)
    return make_submit(request, PROMPT, max_tokens=longest, sampling=sampling, stop_ids=[END])


def answers(engine: Engine, *submits: Submit) -> Heard:
    for submit in submits:
        engine.submit(submit)
    return run(engine)


choices = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


@choices
def test_min_tokens_puts_off_the_end_but_not_that_of_a_finished_grammar(
    choice: dict[str, Any],
) -> None:
    abc = Grammar(GrammarKind.REGEX, "abc")
    submits = [a_submit(seed, LETTERS, min_tokens=20, **choice) for seed in range(6)]
    heard = answers(an_engine(), a_submit(9, abc, min_tokens=20, **choice), *submits)
    assert (text_of(heard.ids[9]), heard.finish[9]) == ("abc", "stop")
    for seed in range(6):
        assert re.fullmatch("[a-c]{20,60}", text_of(heard.ids[seed]))
        assert END not in heard.ids[seed][:20]


@choices
def test_without_regard_to_ends_only_the_grammar_ends_an_answer(choice: dict[str, Any]) -> None:
    submits = [a_submit(seed, LETTERS, ignore_eos=True, **choice) for seed in range(6)]
    heard = answers(an_engine(), *submits)
    for seed in range(6):
        assert re.fullmatch("[a-c]{1,60}", text_of(heard.ids[seed])), text_of(heard.ids[seed])
        assert (END in heard.ids[seed][:-1], heard.finish[seed]) == (False, "stop")


@choices
@pytest.mark.parametrize("mtp", [0, 3])
def test_only_tokens_that_both_allow_are_chosen(choice: dict[str, Any], mtp: int) -> None:
    limits = TokenLimits([*DIGITS, END], [], [])
    submits = [a_submit(seed, HEX, limits=limits, **choice) for seed in range(6)]
    engine = an_engine()
    if mtp:
        engine, _ = drafting_engine(mtp, agreement=0.7, vocabulary=toy_vocabulary())
    heard = answers(engine, *submits)
    for seed in range(6):
        assert re.fullmatch("[0-9]{8}", text_of(heard.ids[seed]))
        assert heard.finish[seed] == "stop"


@choices
@pytest.mark.parametrize("mtp", [0, 3])
@pytest.mark.parametrize(
    ("grammar", "allowed"), [(HEX, [12]), (HEX, [END]), (ANY, [WORDS.index("-")])]
)
def test_where_no_token_is_left_the_request_fails_by_kind_and_others_go_on(
    choice: dict[str, Any], mtp: int, grammar: Grammar, allowed: list[int]
) -> None:
    limits = TokenLimits(allowed, [], [])
    if allowed == [12]:
        limits = TokenLimits([*range(10), END], [], [])  # signs only
    others = [a_submit(seed, HEX if seed % 2 else None, seed=seed) for seed in range(4)]
    engine, alone = an_engine(), an_engine()
    if mtp:
        engine, _ = drafting_engine(mtp, agreement=0.7, vocabulary=toy_vocabulary())
    want = answers(alone, *others)
    heard = answers(engine, a_submit(9, grammar, limits=limits, **choice), *others)
    failed = heard.failed.pop(9)
    assert failed.kind is FailureKind.GRAMMAR
    assert failed.message.endswith(": the request forbids all tokens that may come next")
    assert 9 not in heard.ids
    assert (heard.ids, heard.finish, heard.failed) == (want.ids, want.finish, {})


def test_a_strong_bias_against_all_that_is_allowed_changes_nothing_but_the_choice() -> None:
    bias = [Ranked(token, -1e6) for token in range(40)]
    for choice in CHOICES.values():
        heard = answers(an_engine(), a_submit(1, HEX, logit_bias=bias, **choice))
        assert re.fullmatch("[0-9a-f]{8}", text_of(heard.ids[1]))


@pytest.mark.parametrize("stop", [WORDS.index("b"), END])
def test_stop_tokens_of_the_client_cut_an_answer_short(stop: int) -> None:
    submits = [
        make_submit(seed, PROMPT, max_tokens=60, sampling=follows(LETTERS, seed=seed), stop_ids=[stop, END])
        for seed in range(6)
    ]  # fmt: skip
    heard = answers(an_engine(), *submits)
    for seed in range(6):
        ids = heard.ids[seed]
        assert heard.finish[seed] == "stop"
        assert stop not in ids[:-1]
        assert re.fullmatch("[a-c]{1,60}", text_of(ids))


@pytest.mark.parametrize("mtp", [0, 3])
@choices
def test_log_probabilities_are_those_of_the_model_as_if_there_were_no_grammar(
    choice: dict[str, Any], mtp: int
) -> None:
    """Of the chosen token and of the best ones: the best may be tokens that the grammar forbids."""
    engine = an_engine()
    if mtp:
        engine, _ = drafting_engine(mtp, agreement=0.7, vocabulary=toy_vocabulary())
    heard = answers(engine, a_submit(1, HEX, logprobs=3, **choice))
    ids, entries = heard.ids[1], heard.logprobs[1]
    assert len(entries) == len(ids) == 8
    forbidden = 0
    for at, entry in enumerate(entries):
        scored = make_submit(
            2, [*PROMPT, *ids[:at], ids[at], 0], max_tokens=0, sampling=Sampling(prompt_logprobs=3)
        )
        (first,) = answers(an_engine(), scored).first.values()
        assert first.prompt_logprobs is not None
        want = first.prompt_logprobs[len(PROMPT) + at - 1]
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [top.token for top in entry.top] == [top.token for top in want.top]
        forbidden += sum(WORDS[top.token] not in "0123456789abcdef" for top in entry.top)
    assert forbidden > 0


@pytest.mark.parametrize("mtp", [0, 1, 3])
def test_steps_that_begin_while_another_runs_change_no_answer(mtp: int) -> None:
    """Where a grammar ends the answer the step after it was begun as if it went on."""
    submits = [
        a_submit(seed, grammar, **choice)
        for seed, (grammar, choice) in enumerate(
            itertools.product([*GRAMMARS.values(), None], CHOICES.values())
        )
    ]
    want = answers(an_engine(sequences=4), *submits)
    engine, model = an_engine(sequences=4), None
    if mtp:
        engine, model = drafting_engine(
            mtp, agreement=0.7, sequences=4, vocabulary=toy_vocabulary()
        )
    del model
    for submit in submits:
        engine.submit(submit)
    heard, begun = Heard(), 0
    step = engine.steps.begin()
    while step is not None:
        following = engine.steps.begin() if engine.steps.may_begin and not engine.idle else None
        begun += following is not None
        step.run()
        step.read()
        heard.hear(engine.steps.finish(step))
        engine.check()
        if following is None and not engine.idle:
            following = engine.steps.begin()
        step = following
    assert begun > 20
    assert (heard.ids, heard.finish, heard.failed) == (want.ids, want.finish, {})


class NotFinite(ToyModel):
    """Some of its logits are no numbers, in the third step."""

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        logits = super().forward(batch, progress)
        if self.forwards == 3:
            logits[:] = torch.nan
        return logits


@choices
def test_logits_that_are_no_numbers_are_no_fault_of_the_grammar(choice: dict[str, Any]) -> None:
    engine = engine_on(NotFinite(), vocabulary=toy_vocabulary())
    heard = answers(engine, a_submit(1, HEX, **choice), a_submit(2, ANY, **choice))
    for request in (1, 2):
        assert heard.failed[request].kind is FailureKind.ENGINE
        assert "not finite" in heard.failed[request].message


def test_bytes_that_no_token_has_fail_the_request_and_say_so() -> None:
    """The vocabulary has no capital letters."""
    grammar = Grammar(GrammarKind.REGEX, "ab(C|D)")
    heard = answers(an_engine(), a_submit(1, grammar))
    assert text_of(heard.ids[1]) == "ab"
    assert heard.failed[1].kind is FailureKind.GRAMMAR
    assert heard.failed[1].message.endswith(": no token has the bytes that come next")


def test_a_batch_row_that_another_sequence_took_has_the_rules_of_that() -> None:
    vocabulary = GrammarVocabulary.of_tokens([b"a", b"b", b"\xffend"], [2])
    grammars = Grammars(3, 2)
    core = grammars._core  # pyright: ignore[reportPrivateUsage]
    rules = AnswerRules(vocabulary.compile("regex", "a{3}"))

    def take(batch_row: int, rules: AnswerRules | None, generated: list[int]) -> None:
        sequence = SimpleNamespace(rules=rules)
        added = SimpleNamespace(batch_row=batch_row, sequence=sequence, generated=generated)
        grammars.take_row(cast("AddedRow", added))

    def asked() -> bool:
        rows = SimpleNamespace(
            batch_rows=np.arange(2), counts=np.ones(2, np.int64), starts=np.arange(2),
            drafts=np.zeros(2, np.int32),
        )  # fmt: skip
        begun = grammars.begin(cast("Any", rows)) is not None
        if begun:
            core.masks()  # what an answer brought with it is taken in before its mask is made
        return begun

    assert not asked()
    take(0, rules, [1])
    take(1, rules, [])
    assert asked()
    assert core.error(0) is not None, "a token that the grammar does not allow"
    assert core.error(1) is None
    take(0, None, [])
    assert core.error(0) is None, "it is forgotten"
    assert asked(), "the other one has rules"
    take(1, None, [])
    assert not asked()
    take(1, rules, [0, 1])
    assert asked()
    assert core.error(1) is not None
    take(1, rules, [0])
    assert asked()
    assert core.error(1) is None

"""Sampling on the host, in numpy and Rust, beside the rule of a device, in torch: the same answers to all requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.sampling import logits_processors
from headrace.engine.sampling.device_logits import DeviceLogits
from headrace.engine.sampling.host_logits import HostLogits, logits_of
from headrace.engine.sampling.logits import Edits, TokenIds
from headrace.engine.sampling.logits_processors import Context
from headrace.engine.sampling.penalties import Penalties
from headrace.engine.sampling.token_limits import AnswerLimits
from headrace.engine.sequence import Key, Sequence
from headrace.engine.speculative import draft
from headrace.engine.step import forward
from headrace.wire.frames import Ranked, Sampling, TokenLimits
from helpers.engine import drafting_engine
from helpers.engine.pair import Heard, unsplit
from helpers.engine.toy import ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.engine.toy_grammar import END, GRAMMARS, follows, toy_vocabulary

LIMITS = TokenLimits(allowed=[], lengths=[1, 2], banned=[7, 3, 9])
ALLOWED = TokenLimits(allowed=[4, 8, 15, 16, 23, 42], lengths=[], banned=[])
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "bias": {"temperature": 0.0, "logit_bias": [Ranked(3, 2.5), Ranked(9, -4.0), Ranked(3, 0.5)]},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.2,
    },
    "banned": {"temperature": 0.0, "limits": LIMITS},
    "allowed": {"temperature": 0.9, "limits": ALLOWED},
    "min_tokens": {"temperature": 0.0, "min_tokens": 8},
    "drawn": {"temperature": 0.8},
    "hot": {"temperature": 50.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of all": {"temperature": 1.0, "top_k": 49, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"temperature": 0.7, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3},
    "all": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "logit_bias": [Ranked(5, 1.0)],
        "min_tokens": 3,
        "limits": LIMITS,
        "logprobs": 2,
    },
}


def same(found: Heard, want: Heard) -> None:
    assert found.failed is None
    assert (found.ids, found.finish) == (want.ids, want.finish)
    for one, other in zip(found.logprobs, want.logprobs, strict=True):
        # Sums of float64 against those of float32.
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [ranked.token for ranked in one.top] == [ranked.token for ranked in other.top]


@pytest.mark.parametrize("asked", ASKED)
def test_answers_are_those_of_the_rule_in_torch(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(seed: int) -> Heard:
        sampling = Sampling(seed=seed, **ASKED[asked])
        submit = make_submit(seed, [3, 1, 4, 1, 5], max_tokens=24, sampling=sampling, stop_ids=[2])
        return unsplit(engine_on(ToyModel()), submit)

    on_host = [answer(seed) for seed in range(4)]
    monkeypatch.setattr(forward, "logits_of", DeviceLogits)
    for found, seed in zip(on_host, range(4), strict=True):
        same(found, answer(seed))


@pytest.mark.parametrize("name", GRAMMARS)
def test_answers_with_rules_are_those_of_the_rule_in_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(seed: int) -> Heard:
        sampling = follows(GRAMMARS[name], seed=seed)
        submit = make_submit(seed, [3, 1, 4], max_tokens=20, sampling=sampling, stop_ids=[END])
        return unsplit(engine_on(ToyModel(), vocabulary=toy_vocabulary()), submit)

    on_host = [answer(seed) for seed in range(3)]
    monkeypatch.setattr(forward, "logits_of", DeviceLogits)
    for found, seed in zip(on_host, range(3), strict=True):
        same(found, answer(seed))


@pytest.mark.parametrize("rejection", [False, True], ids=["noise", "rejection"])
@pytest.mark.parametrize("asked", ["greedy", "drawn", "all", "top_k", "penalties"])
def test_answers_with_drafts_are_those_of_the_rule_in_torch(
    asked: str, rejection: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> list[tuple[list[int], str | None]]:
        engine, _ = drafting_engine.make_engine(3, rejection=rejection)
        for request in range(3):
            sampling = Sampling(seed=request, **ASKED[asked])
            engine.submit(make_submit(request, [3, 1, 4], max_tokens=20, sampling=sampling))
        heard = drafting_engine.run(engine)
        return [(heard.ids(request), heard.finish(request)) for request in range(3)]

    on_host = answer()
    for module in (forward, draft):
        monkeypatch.setattr(module, "logits_of", DeviceLogits)
    assert on_host == answer()


def test_edits_change_the_same_bits() -> None:
    random = np.random.default_rng(4)
    columns = None
    for trial in range(20):
        values = (random.normal(0, 3, (4, 300)) * random.choice([1, 1e5])).astype(np.float32)
        contexts = [
            a_context(random, bias=trial % 2 == 0, limits=row == 2 and trial % 3 == 0)
            for row in range(3)
        ]
        if trial >= 10:  # of a head that drafts some of the tokens
            kept = np.sort(random.choice(600, 300, replace=False))
            columns = np.full(600, -1)
            columns[kept] = np.arange(300)
        host, tensor = values.copy(), torch.from_numpy(values.copy())
        for logits in (HostLogits(host), DeviceLogits(tensor)):
            logits_processors.edit(logits, np.array([0, 2, 3]), contexts, columns)
        np.testing.assert_array_equal(host.view(np.int32), tensor.numpy().view(np.int32))


def a_context(random: np.random.Generator, *, bias: bool, limits: bool) -> Context:
    most = 300
    sampling = Sampling(
        repetition_penalty=float(random.uniform(0.5, 2)),
        presence_penalty=float(random.uniform(-1, 1)),
        frequency_penalty=float(random.uniform(-1, 1)),
        logit_bias=[Ranked(int(token), 1.5) for token in random.integers(0, most, 9)] * bias,
        min_tokens=9,
    )
    limited = AnswerLimits(TokenLimits(ALLOWED.allowed, [5], [1]), []) if limits else None
    prompt = random.integers(0, most, 40).astype(np.int32)
    answer = random.integers(0, most, 5).tolist()
    return Context(
        Sequence(
            key=Key(0, 0), arrival=0, priority=0, prompt=prompt, listed=answer, limit=99, sampling=sampling,
            stop_ids=frozenset({1, 2}), salt=b"", deadline_s=None, names=[],
            penalties=Penalties(prompt, answer, with_prompt=True), limits=limited,
        ),
        5,
        [3, 3],
    )  # fmt: skip


@pytest.mark.parametrize("columns", [1, 7, 64, 300, 3000])
def test_the_highest_begin_with_the_same(columns: int) -> None:
    random = np.random.default_rng(columns)
    values = random.normal(0, 2, (9, columns)).astype(np.float32)
    values[::2] = values[::2].round()  # ties
    values[1, ::3] = -np.inf
    k = random.integers(1, columns + 1, 9)
    host = logits_of(values).highest(k)
    device = DeviceLogits(torch.from_numpy(values)).highest(k)
    for row, most in enumerate(k):
        assert host.ids[row, :most].tolist() == device.ids[row, :most].tolist()
        assert host.logits[row, :most].tolist() == device.logits[row, :most].tolist()
        rest = host.logits[row, most:]
        assert (rest <= host.logits[row, most - 1]).all()


def test_numbers_of_columns_are_the_same() -> None:
    values = np.random.default_rng(1).normal(0, 4, (6, 500)).astype(np.float32)
    host, device = HostLogits(values), DeviceLogits(torch.from_numpy(values))
    rows, columns = np.array([5, 0, 2]), np.array([7, 499, 0])
    for one, other in zip(host.argmax(), device.argmax(), strict=True):
        assert one.tolist() == other.tolist()
    best = host.argmax()[1]
    # Sums of float64, and of float32.
    np.testing.assert_allclose(host.log_total(best), device.log_total(best), atol=1e-6)
    shares = (one.probability(rows, columns) for one in (host, device))
    np.testing.assert_allclose(*shares, rtol=1e-5)
    some = np.arange(6)
    assert host.at(some).tolist() == device.at(some).tolist()
    for chosen in (np.array([1, 2, 3]), np.array([0, 4]), some):
        parts = [one.take(chosen).values().tolist() for one in (host, device)]
        assert parts[0] == parts[1] == values[chosen].tolist()


def test_what_is_taken_is_a_copy_where_one_is_asked_for() -> None:
    for logits in (HostLogits(np.ones((3, 4), np.float32)), DeviceLogits(torch.ones(3, 4))):
        copied, shared = logits.take(np.arange(3), copy=True), logits.take(np.array([1, 2]))
        nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
        logits.edit(
            Edits(
                added=nothing,
                penalised=(*nothing, nothing[1]),
                forbidden=np.array([4]),
                kept=[],
            )
        )
        assert np.isfinite(copied.values()).all()
        assert shared.values()[0, 0] == -np.inf


@pytest.mark.parametrize("wrong", ["place", "row", "column", "lengths"])
def test_edits_of_other_logits_are_refused_and_change_nothing(wrong: str) -> None:
    values = np.ones((2, 5), np.float32)
    ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    added = {"place": (np.array([10]), np.ones(1, np.float32)), "lengths": (np.array([1]), floats)}
    kept = {"row": [(2, ints)], "column": [(0, np.array([5]))]}
    edits = Edits(
        added=added.get(wrong, (ints, floats)),
        penalised=(ints, floats, floats),
        forbidden=np.array([3]),
        kept=kept.get(wrong, []),
    )
    with pytest.raises(ValueError, match="edits"):
        HostLogits(values).edit(edits)
    assert (values == 1).all()


@pytest.mark.parametrize("k", [[0], [6], [1, 1], [-1]])
def test_more_columns_than_there_are_are_refused(k: list[int]) -> None:
    with pytest.raises(ValueError, match="1 rows of 5 logits"):
        HostLogits(np.ones((1, 5), np.float32)).highest(np.array(k))


def test_a_device_keeps_the_ids_of_columns() -> None:
    tokens = TokenIds(np.arange(8, dtype=np.int32))
    assert tokens.on_device is None
    logits = DeviceLogits(torch.zeros(1, 8))
    kept = logits._tokens(tokens)
    assert logits._tokens(tokens) is kept

"""A prompt as a vector: the same whatever the chunks, the company, the cache and the preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.pooling import PooledPrompt
from headrace.engine.sequence import Key
from headrace.wire.frames import Pooling, Sampling, Submit
from helpers.engine import drafting_engine
from helpers.engine.hearing import Heard, run, run_out
from helpers.engine.toy import POOLED_WIDTH, ToyModel, digest, make_submit, toy_row
from helpers.engine.toy_engine import engine_on, make_engine

KINDS = [Pooling.LAST, Pooling.MEAN]
PROMPT = [(7 * i) % 50 for i in range(23)]


def pooled_submit(request: int, tokens: list[int], pooling: Pooling) -> Submit:
    return replace(make_submit(request, tokens, max_tokens=0), pooling=pooling)


def wanted(tokens: list[int], pooling: Pooling) -> NDArray[np.float32]:
    """Without any engine: the sum in float64, in the order of positions."""
    kv = np.array([t * 4096 + i for i, t in enumerate(tokens)], dtype=np.int64)
    if pooling is Pooling.LAST:
        return toy_row(digest(kv))
    total = np.zeros(POOLED_WIDTH)
    for end in range(1, len(tokens) + 1):
        total += toy_row(digest(kv[:end]))
    return (total / len(tokens)).astype(np.float32)


def vector(heard: Heard, request: int) -> NDArray[np.float32]:
    assert heard.finish[request] == "length"
    assert heard.ids[request] == []
    pooled = heard.first[request].pooled
    assert pooled is not None
    return np.frombuffer(pooled, "<f4")


@pytest.mark.parametrize("pooling", KINDS)
@pytest.mark.parametrize("batched", [1, 2, 5, 32])
@pytest.mark.parametrize("company", [False, True])
def test_a_vector_does_not_depend_on_chunks_and_company(
    pooling: Pooling, batched: int, company: bool
) -> None:
    engine, _ = make_engine(batched=batched, sequences=min(batched, 8))
    if company:
        engine.submit(make_submit(1, [9, 8, 7, 6, 5], max_tokens=12))
        engine.submit(pooled_submit(2, [3] * 17, Pooling.MEAN))
        engine.submit(make_submit(3, [4] * 9, max_tokens=0, sampling=Sampling(prompt_logprobs=1)))
    engine.submit(pooled_submit(0, PROMPT, pooling))
    heard = run(engine)
    assert (vector(heard, 0) == wanted(PROMPT, pooling)).all()
    if company:
        assert (vector(heard, 2) == wanted([3] * 17, Pooling.MEAN)).all()
        assert len(heard.ids[1]) == 12
        assert len(heard.first[3].prompt_logprobs or []) == 8


@pytest.mark.parametrize(("pooling", "cached"), [(Pooling.LAST, 20), (Pooling.MEAN, 0)])
def test_only_the_last_row_can_do_without_the_prefix(pooling: Pooling, cached: int) -> None:
    engine, model = make_engine()
    engine.submit(make_submit(1, PROMPT, max_tokens=2))
    run(engine)
    before = model.rows
    engine.submit(pooled_submit(0, PROMPT, pooling))
    heard = run(engine)
    assert heard.first[0].cached_tokens == cached
    assert model.rows - before == len(PROMPT) - cached
    assert (vector(heard, 0) == wanted(PROMPT, pooling)).all()


@pytest.mark.parametrize("pooling", KINDS)
def test_a_prompt_that_loses_its_blocks_begins_again(pooling: Pooling) -> None:
    """Nine blocks, a prompt that needs six of them, and an answer that grows until it needs one of these."""
    engine, _ = make_engine(blocks=9, batched=2, sequences=2, prefix_cache=False)
    heard = Heard()
    engine.submit(make_submit(1, [1, 2, 3], max_tokens=30))
    for _ in range(2):
        heard.hear(engine.step())
    engine.submit(replace(pooled_submit(0, PROMPT, pooling), priority=-1))
    run(engine, heard)
    assert engine.stages.preemptions > 0
    assert (vector(heard, 0) == wanted(PROMPT, pooling)).all()


@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("pooling", KINDS)
def test_steps_that_overlap_change_nothing(pooling: Pooling, reads_late: bool) -> None:
    engine, _ = make_engine(batched=6, sequences=4, reads_late=reads_late)
    engine.submit(make_submit(1, [9, 8, 7], max_tokens=12))
    engine.submit(pooled_submit(0, PROMPT, pooling))
    heard = Heard()
    step = engine.steps.begin()
    while step is not None:
        following = engine.steps.begin() if engine.steps.may_begin and not engine.idle else None
        step.run()
        step.read()
        heard.hear(engine.steps.finish(step))
        engine.check()
        step = following or (None if engine.idle else engine.steps.begin())
    assert (vector(heard, 0) == wanted(PROMPT, pooling)).all()
    assert len(heard.ids[1]) == 12


@pytest.mark.parametrize("pooling", KINDS)
def test_drafting_beside_it_changes_nothing(pooling: Pooling) -> None:
    engine, _ = drafting_engine.make_engine(3, batched=9, sequences=2)
    engine.submit(make_submit(1, [9, 8, 7], max_tokens=12))
    engine.submit(pooled_submit(0, PROMPT, pooling))
    heard = run_out(engine, Heard(), 5_000)
    assert (vector(heard, 0) == wanted(PROMPT, pooling)).all()


def test_a_deadline_or_a_cancel_gives_no_vector() -> None:
    engine, _ = make_engine(batched=4, sequences=4)
    engine.submit(replace(pooled_submit(0, PROMPT, Pooling.MEAN), deadline_ms=10), now_s=0.0)
    engine.submit(pooled_submit(1, PROMPT, Pooling.LAST), now_s=0.0)
    heard = Heard()
    heard.hear(engine.step(now_s=0.0))
    engine.cancel(Key(0, 1))
    while not engine.idle:
        heard.hear(engine.step(now_s=1.0))
    assert heard.finish == {0: "cancelled"}
    assert heard.first[0].pooled is None
    engine.check_idle()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda s: replace(s, max_tokens=1), FailureKind.BAD_SAMPLING),
        (lambda s: replace(s, sampling=Sampling(prompt_logprobs=0)), FailureKind.BAD_SAMPLING),
        (lambda s: replace(s, kv_transfer=make_submit(1, [1], lease_ms=9).kv_transfer), FailureKind.UNSUPPORTED),
        (lambda s: replace(s, tokens=b""), FailureKind.EMPTY_PROMPT),
    ],
)  # fmt: skip
def test_what_has_no_vector_is_refused(
    change: Callable[[Submit], Submit], kind: FailureKind
) -> None:
    engine, _ = make_engine()
    assert failure_of(engine, change(pooled_submit(0, PROMPT, Pooling.MEAN))) == kind


def test_a_model_that_gives_no_hidden_states_pools_no_prompt() -> None:
    model = ToyModel()
    model.pooled_width = 0
    engine = engine_on(model)
    assert failure_of(engine, pooled_submit(0, PROMPT, Pooling.LAST)) == FailureKind.UNSUPPORTED


def failure_of(engine: Engine, submit: Submit) -> FailureKind:
    with pytest.raises(RequestError) as failed:
        engine.submit(submit)
    return failed.value.kind


def test_a_hidden_state_that_is_no_number_fails_its_request_alone() -> None:
    class Spoilt(ToyModel):
        def pooled(self) -> torch.Tensor:
            rows = super().pooled().clone()
            rows[0, 1] = float("nan")
            return rows

    engine = engine_on(Spoilt())
    engine.submit(pooled_submit(0, PROMPT, Pooling.LAST))
    engine.submit(make_submit(1, [1, 2], max_tokens=3))
    heard = run(engine)
    assert heard.failed[0].kind == FailureKind.ENGINE
    assert "not finite" in heard.failed[0].message
    assert len(heard.ids[1]) == 3


@pytest.mark.parametrize("cuts", [[23], [1] * 23, [4, 4, 15]])
def test_a_mean_is_added_up_row_by_row_in_float64(cuts: list[int]) -> None:
    rows = np.random.default_rng(3).normal(size=(23, 5)).astype(np.float32) * 1e4
    pooled = PooledPrompt(Pooling.MEAN, 23)
    start = 0
    for count in cuts:
        places = pooled.wanted(start, count)
        assert list(places) == list(range(start, start + count))
        pooled.add(rows[places.start : places.stop])
        start += count
    total = np.zeros(5)
    for row in rows:
        total = total + row.astype(np.float64)
    assert pooled.vector() == (total / 23).astype("<f4").tobytes()

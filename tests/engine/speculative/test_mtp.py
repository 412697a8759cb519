"""Drafting changes the number of steps and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind
from headrace.engine.sequence import Key
from headrace.models import Batch
from headrace.wire.frames import Sampling
from headrace_kernels.ops import Progress
from helpers.engine.drafting_engine import (
    BLOCK,
    KINDS,
    Heard,
    a_submit,
    assert_same,
    make_engine,
    plain,
    run,
)
from helpers.engine.drafting_toy import DraftingToy
from helpers.engine.toy import ToyHasher, ToyModel, make_submit


@pytest.mark.matrix
@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_answers_are_those_without_drafts(k: int, agreement: float) -> None:
    engine, _ = make_engine(k, agreement=agreement, sequences=6)
    submits = [a_submit(request) for request in range(20)]
    for submit in submits:
        engine.submit(submit)
    assert_same(run(engine), submits)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_perfect_drafts_are_all_accepted(k: int) -> None:
    engine, model = make_engine(k, agreement=1.0)
    for request, sampling in enumerate(KINDS):
        submit = make_submit(
            request,
            [3, 1, 4, request],
            max_tokens=4 * (k + 1) + 1,
            sampling=replace(sampling, seed=9),
        )
        engine.submit(submit)
        forwards = model.forwards
        heard = run(engine)
        assert model.forwards - forwards == 1 + 4, sampling
        assert heard.drafts(request) == (4 * k, 4 * k)
        step = sum(result.drafted for result in heard.results)
        assert step == sum(result.accepted for result in heard.results) == 4 * k


@pytest.mark.matrix
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("batched", [8, 9, 13, 40])
@pytest.mark.parametrize("blocks", [14, 22, 64])
def test_chunking_and_preemption_change_nothing(k: int, batched: int, blocks: int) -> None:
    engine, _ = make_engine(k, agreement=0.7, batched=batched, blocks=blocks)
    submits = [a_submit(request, prompt=14, max_tokens=16) for request in range(14)]
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    if blocks == 14:
        assert engine.stages.preemptions > 0
    assert_same(heard, submits)


def test_a_head_for_some_tokens_only_costs_guesses() -> None:
    engine, _ = make_engine(3, agreement=1.0, some_tokens=True)
    submits = [a_submit(request) for request in range(12)]
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    assert_same(heard, submits)
    accepted = sum(result.accepted for result in heard.results)
    assert 0 < accepted < sum(result.drafted for result in heard.results) / 2


def counted(model: DraftingToy) -> list[int]:
    """The rows of each forward pass from now on."""
    rows: list[int] = []
    forward = model.forward

    def counting(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        rows.append(batch.rows)
        return forward(batch, progress)

    model.forward = counting  # type: ignore[method-assign]
    return rows


def test_rows_of_drafts_come_out_of_the_budget_and_prompts_get_half() -> None:
    engine, model = make_engine(3, agreement=0.0, batched=16, sequences=8)
    rows = counted(model)
    submits = [make_submit(r, [r] * 3, max_tokens=30) for r in range(6)]
    submits += [make_submit(9, [9] * 40, max_tokens=3)]
    for submit in submits[:6]:
        engine.submit(submit)
    heard = Heard()
    for _ in range(6):
        heard.hear(engine.step())
    assert rows[-1] == 6 + 6, "one draft each: two would be 18 rows"
    engine.submit(submits[6])
    steps = 0
    while 9 not in heard.outputs:
        heard.hear(engine.step())
        steps += 1
    assert steps <= 8, "at least 5 of 16 rows are the prompt's"
    run(engine, heard)
    assert max(rows) <= 16
    assert_same(heard, submits)


def test_an_answer_ends_inside_its_drafts() -> None:
    whole = plain(make_submit(0, [1, 2, 3], max_tokens=40))[0]
    for length in range(1, 20):
        engine, _ = make_engine(3, agreement=1.0)
        engine.submit(make_submit(0, [1, 2, 3], max_tokens=length))
        heard = run(engine)
        assert heard.ids(0) == whole[:length]
        assert heard.finish(0) == "length"
        drafted, accepted = heard.drafts(0)
        assert accepted == length - len(heard.outputs[0]) <= drafted
    for place, stop in enumerate(whole):
        engine, _ = make_engine(3, agreement=1.0)
        engine.submit(make_submit(0, [1, 2, 3], max_tokens=40, stop_ids=[stop]))
        heard = run(engine)
        assert heard.ids(0) == whole[: whole.index(stop) + 1], place
        assert heard.finish(0) == "stop"
        assert heard.drafts(0)[1] <= len(heard.ids(0)) - 1


def test_the_context_ends_an_answer_between_drafts() -> None:
    for blocks in (3, 4):
        engine, _ = make_engine(3, agreement=1.0, blocks=blocks)
        engine.submit(make_submit(0, [1, 2, 3], max_tokens=100))
        heard = run(engine)
        assert len(heard.ids(0)) == blocks * BLOCK - 3
        assert heard.finish(0) == "length"


@pytest.mark.parametrize("k", [1, 3])
def test_a_prefix_brings_its_hidden_state_along(k: int) -> None:
    engine, model = make_engine(k, agreement=1.0)
    prompt = [5, 4, 3, 2, 1, 0, 9, 8, 7]
    engine.submit(make_submit(0, prompt, max_tokens=9))
    first = run(engine)
    longer = prompt + first.ids(0)
    for request, tokens in enumerate([prompt, longer, [*longer, 1], [*longer[:8], 3]], 1):
        submit = make_submit(request, tokens, max_tokens=4 * (k + 1) + 1)
        engine.submit(submit)
        forwards = model.forwards
        heard = run(engine)
        assert heard.outputs[request][0].cached_tokens or 0 >= 8
        assert heard.drafts(request) == (4 * k, 4 * k), "it drafts as if it had computed it all"
        assert model.forwards - forwards == 5
        assert_same(heard, [submit])


def test_generated_text_is_named_only_as_far_as_it_was_accepted() -> None:
    drafting, _ = make_engine(3, agreement=0.3)
    silent, _ = make_engine(0)
    for engine in (drafting, silent):
        for request in range(8):
            engine.submit(a_submit(request))
        run(engine)
    assert set(drafting.pool.names()) == set(silent.pool.names())


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(sampling: Sampling) -> None:
    submit = make_submit(
        0, [1, 2, 3, 4, 5], max_tokens=17, sampling=replace(sampling, seed=3, min_tokens=8)
    )
    ids, logprobs, finish = plain(submit)
    for done in range(1, len(ids)):
        engine, _ = make_engine(2, agreement=0.6)
        engine.submit(replace(submit, resume=make_submit(0, [1], resumed=ids[:done]).resume))
        heard = run(engine)
        assert heard.ids(0) == ids[done:]
        assert heard.logprobs(0) == logprobs[done:]
        assert heard.finish(0) == finish


def test_choices_of_one_prompt_draft_each_for_itself() -> None:
    engine, _ = make_engine(2, agreement=0.8, sequences=4)
    submits = [
        make_submit(r, [4] * 13, max_tokens=20, sampling=Sampling(temperature=1.0, seed=40 + r))
        for r in range(4)
    ]
    for submit in submits:
        engine.submit(submit)
    assert_same(run(engine), submits)


@pytest.mark.parametrize("batched", [4, 7, 64])
def test_prompt_logprobs_are_the_same(batched: int) -> None:
    for max_tokens in (0, 6):
        submit = make_submit(
            0,
            list(range(20)),
            max_tokens=max_tokens,
            sampling=Sampling(prompt_logprobs=2, logprobs=1),
        )
        answers: list[Heard] = []
        for k in (0, 3):
            engine, _ = make_engine(k, batched=batched, sequences=4, agreement=0.9)
            engine.submit(submit)
            answers.append(run(engine))
        first, second = answers
        assert first.outputs[0][0].prompt_logprobs == second.outputs[0][0].prompt_logprobs
        assert first.ids(0) == second.ids(0)
        assert first.logprobs(0) == second.logprobs(0)


def test_a_failed_draft_fails_its_batch_and_nobody_else() -> None:
    engine, model = make_engine(2)
    engine.submit(make_submit(0, [1, 2, 3], max_tokens=9))
    engine.step()
    model.fail_next_draft = RuntimeError("no memory")
    result = engine.step()
    [failed] = result.of(0).failed
    assert failed.kind == FailureKind.ENGINE
    assert "RuntimeError: no memory" in failed.message
    engine.check()
    submit = a_submit(1)
    engine.submit(submit)
    assert_same(run(engine), [submit])


def spoiled(model: DraftingToy, position: int) -> Callable[..., torch.Tensor]:
    """`model.forward` with the logits of a position that are none."""
    forward = model.forward

    def broken(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        logits = forward(batch, progress)
        logits[torch.from_numpy(batch.positions[batch.logit_rows] == position)] = np.nan
        return logits

    return broken


def test_logits_that_are_not_finite_behind_a_draft_change_nothing_before_it() -> None:
    """The row is computed again without being a draft's, and fails then, as it would have without drafts."""
    submit = make_submit(0, [1, 2, 3], max_tokens=12)
    ids = plain(submit)[0]
    for bad in range(1, 9):
        engine, model = make_engine(3, agreement=1.0)
        model.forward = spoiled(model, 2 + bad)  # type: ignore[method-assign]
        engine.submit(submit)
        got: list[int] = []
        failed: list[str] = []
        while not engine.idle:
            answers = engine.step().of(0)
            got += [token for output in answers.outputs for token in output.ids]
            failed += [failure.message for failure in answers.failed]
        assert got == ids[:bad]
        assert failed == ["the model's logits are not finite"]
        engine.check_idle()


def test_cancel_frees_what_was_reserved_for_drafts() -> None:
    engine, _ = make_engine(3, agreement=1.0)
    engine.submit(make_submit(0, [1] * 7, max_tokens=40))
    for _ in range(3):
        engine.step()
    held = engine.pool.used
    assert engine.cancel(Key(0, 0)) == held > 0
    engine.check()
    engine.check_idle()


def test_a_model_without_a_drafting_layer_is_refused() -> None:
    model = ToyModel(block_tokens=BLOCK)
    config = EngineConfig(num_blocks=4, block_tokens=BLOCK, mtp=1)
    with pytest.raises(ValueError, match="drafting layer"):
        Engine(model, config, ToyHasher(BLOCK))
    for mtp in (-1, 4):
        with pytest.raises(ValueError, match=f"mtp is {mtp}"):
            EngineConfig(num_blocks=4, mtp=mtp)


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 5], [7, 50]])
def test_a_draft_head_of_impossible_tokens_is_refused(ids: list[int]) -> None:
    model = DraftingToy(block_tokens=BLOCK, draft_token_ids=np.array(ids, np.int32))
    config = EngineConfig(num_blocks=4, block_tokens=BLOCK, mtp=1)
    with pytest.raises(ValueError, match="draft head"):
        Engine(model, config, ToyHasher(BLOCK))

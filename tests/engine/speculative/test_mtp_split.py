"""Drafting after a hand-off: the hidden state comes with the blocks, so drafts are as good as without one."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.step.batch_builder import Prepared
from headrace.wire.frames import Sampling
from headrace_kernels.batch import DraftBatch
from helpers.engine.drafting_engine import BLOCK, Heard, a_submit, make_engine, plain, run
from helpers.engine.pair import split
from helpers.engine.toy import make_submit


def a_pair(k: int, agreement: float = 1.0) -> tuple[Engine, Engine]:
    prefill, _ = make_engine(k, agreement=agreement, batched=9)
    decode, _ = make_engine(k, agreement=agreement)
    return prefill, decode


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("agreement", [0.3, 1.0])
def test_answers_in_two_legs_are_those_of_one(k: int, agreement: float) -> None:
    prefill, decode = a_pair(k, agreement)
    for request in range(12):
        submit = a_submit(request, prompt=7 + request, max_tokens=1 + 2 * request)
        heard = split(prefill, decode, submit)
        ids, logprobs, finish = plain(submit)
        assert (heard.ids, heard.logprobs, heard.finish) == (ids, logprobs, finish)


@pytest.mark.parametrize("prompt", range(1, 14))
@pytest.mark.parametrize("k", [1, 3])
def test_drafts_are_the_same_after_a_hand_off(prompt: int, k: int) -> None:
    """Whether the prompt ends inside a block, with it, or with its last token alone in one."""
    submit = make_submit(
        0,
        [(7 * i) % 50 for i in range(prompt)],
        max_tokens=30,
        sampling=Sampling(temperature=0.9, seed=4),
    )
    whole, _ = make_engine(k, agreement=0.6)
    whole.submit(submit)
    aggregated = run(whole)
    prefill, decode = a_pair(k, agreement=0.6)
    steps = [(o.drafted, o.accepted) for o in aggregated.outputs[0]]
    heard = split(prefill, decode, submit)
    assert heard.ids == aggregated.ids(0)
    assert heard.drafts == steps
    assert sum(accepted for _, accepted in steps) > 0


def no_passes(step: Prepared) -> bool:
    """As where drafting does not pay."""
    del step
    return False


def test_a_hand_off_takes_no_block_without_its_drafting_keys_along() -> None:
    """Blocks of an answer that was not drafted for are computed once more."""
    prefill, decode = a_pair(2)
    followed, _ = make_engine(2, agreement=1.0)
    submit = make_submit(0, [3] * 6, max_tokens=12)
    prefill.submit(submit)
    heard = Heard()
    heard.hear(prefill.step())
    drafter = prefill._forward.drafter
    assert drafter is not None
    follow, drafter.follow = drafter.follow, no_passes
    run(prefill, heard)
    drafter.follow = follow
    longer = make_submit(0, [3] * 6 + heard.ids(0), max_tokens=13)
    assert split(prefill, decode, longer).drafts == [(0, 0), *[(2, 2)] * 4]
    prefill.submit(longer)
    assert run(prefill).outputs[0][0].cached_tokens == 16, "for itself it takes what there is"
    followed.submit(longer)
    assert run(followed).ids(0) == plain(longer)[0]


def test_only_blocks_with_drafting_keys_are_offered_to_others() -> None:
    engine, _ = make_engine(2, agreement=1.0)
    engine.submit(make_submit(0, [3] * 9, max_tokens=20))
    heard = Heard()
    for _ in range(3):
        heard.hear(engine.step())
    drafter = engine._forward.drafter
    assert drafter is not None
    drafter.follow = no_passes
    run(engine, heard)
    names = len(engine.pool.names())
    assert 0 < len(engine.pool.hottest(100)) < names == (9 + 19) // BLOCK


def test_the_last_layer_group_is_whole_only_after_the_drafting_pass() -> None:
    engine, model = make_engine(1, agreement=1.0)
    leg = make_submit(0, [1] * 9, max_tokens=9, lease_ms=1000)
    engine.submit(leg)
    seen: list[tuple[bool, bool]] = []
    draft = model.draft

    def watched(batch: DraftBatch) -> torch.Tensor:
        [export] = engine.kv_exports.take()
        seen.append((export.ready(0, 0), export.ready(0, 1)))
        return draft(batch)

    model.draft = watched  # type: ignore[method-assign]
    engine.step()
    assert seen == [(True, False)]

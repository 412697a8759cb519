"""A step that begins while another one is in flight: what it may not know, and what it must not break."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind
from headrace.engine.sequence import Key
from headrace.wire.frames import Sampling, Submit
from helpers.engine.drafting_engine import Heard, kind, make_engine, plain
from helpers.engine.drafting_engine import run as finish_all
from helpers.engine.pair import KV_FROM
from helpers.engine.toy import ToyHasher, make_submit
from helpers.engine.toy_engine import BLOCK
from helpers.engine.toy_engine import make_engine as toy_engine

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch
    from headrace_kernels.ops import Progress


def run_ahead(engine: Engine, heard: Heard | None = None) -> tuple[Heard, int]:
    """Always with the next step begun before the one in flight has run, where it can be; how often it could.

    Where steps are read late, the next one runs before that.
    """
    heard, lookahead = heard or Heard(), 0
    step, ran = engine.steps.begin(), False
    while step is not None:
        following = engine.steps.begin() if engine.steps.may_begin and not engine.idle else None
        lookahead += following is not None
        if not ran:
            step.run()
        ran = following is not None and engine.steps.reads_late
        if ran and following is not None:
            following.run()
        step.read()
        heard.hear(engine.steps.finish(step))
        engine.check()
        if following is None and not engine.idle:
            following = engine.steps.begin()
        step = following
    assert engine.idle
    engine.check_idle()
    return heard, lookahead


def submits() -> list[Submit]:
    return [
        make_submit(
            request,
            [7] * (request % 3) + [(request * 5 + i) % 50 for i in range(9)],
            max_tokens=20,
            sampling=kind(request),
            stop_ids=[5, 11, 31],
        )
        for request in range(10)
    ]


@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_answers_are_those_of_steps_one_by_one(k: int, reads_late: bool) -> None:
    """Greedy and drawn, with penalties, log-probabilities and stop tokens; more requests than batch rows."""
    engine, model = make_engine(k, agreement=0.7) if k else toy_engine(reads_late=reads_late)
    assert engine.steps.reads_late == (reads_late and k == 0)
    for submit in submits():
        engine.submit(submit)
    heard, lookahead = run_ahead(engine)
    for submit in submits():
        request = submit.request
        found = heard.ids(request), heard.logprobs(request), heard.finish(request)
        assert found == plain(submit)
    assert lookahead > 0.8 * model.forwards


def test_drafts_are_checked_and_accepted_as_in_steps_one_by_one() -> None:
    submit = make_submit(0, [1] * 9, max_tokens=30, sampling=Sampling(ignore_eos=True))
    one_by_one, _ = make_engine(2, agreement=1.0)
    one_by_one.submit(submit)
    lookahead, _ = make_engine(2, agreement=1.0)
    lookahead.submit(submit)
    wanted = finish_all(one_by_one)
    heard, _ = run_ahead(lookahead)
    assert heard.ids(0) == wanted.ids(0)
    # The second step knows of no drafts yet; from there on there is one more allowed each time.
    assert heard.drafts(0)[1] >= wanted.drafts(0)[1] - 6


def test_no_step_begins_for_an_answer_whose_length_is_reached() -> None:
    engine, model = toy_engine()
    engine.submit(make_submit(0, [1, 2, 3], max_tokens=5))
    run_ahead(engine)
    assert engine.steps.finished == model.forwards == model.rows - 2 == 5


def test_an_answer_that_stopped_takes_no_row_of_the_next_step() -> None:
    engine, model = toy_engine()
    whole = plain(make_submit(0, [1, 2, 3], max_tokens=5))[0]
    engine.submit(make_submit(0, [1, 2, 3], max_tokens=50, stop_ids=[whole[2]]))
    engine.submit(make_submit(1, [4, 5], max_tokens=9))
    heard, _ = run_ahead(engine)
    assert heard.finish(0) == "stop"
    stopped = whole.index(whole[2]) + 1
    assert model.rows == 3 + 2 + (stopped - 1) + 8


def test_greedy_answers_stay_on_the_device_until_they_are_read() -> None:
    """One row is computed for nothing: that of the step which ran before the stop token was read."""
    engine, model = toy_engine(reads_late=True)
    whole = plain(make_submit(0, [1, 2, 3], max_tokens=9))[0]
    place = next(i for i in range(2, 9) if whole[i] not in whole[:i])
    engine.submit(make_submit(0, [1, 2, 3], max_tokens=50, stop_ids=[whole[place]]))
    heard, lookahead = run_ahead(engine)
    assert heard.ids(0) == whole[: place + 1]
    assert heard.finish(0) == "stop"
    assert lookahead == place + 1
    assert model.rows == 3 + place + 1


def test_logits_that_are_not_finite_fail_the_request_when_they_are_read() -> None:
    engine, model = toy_engine(reads_late=True)
    forward = model.forward

    def broken(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        return forward(batch, progress) * float("nan")

    engine.submit(make_submit(0, [1, 2, 3], max_tokens=9))
    step = engine.steps.begin()
    assert step is not None
    model.forward = broken  # type: ignore[method-assign]
    step.run()
    model.forward = forward  # type: ignore[method-assign]
    following = engine.steps.begin()
    assert following is not None
    following.run()
    for it in (step, following):
        it.read()
    [failed] = engine.steps.finish(step).of(0).failed
    assert "not finite" in failed.message
    assert engine.steps.finish(following).answers == {}
    assert engine.empty and engine.pool.used == 0


def test_what_is_cancelled_in_flight_is_not_heard_of_and_its_blocks_are_free_at_once() -> None:
    engine, _ = toy_engine(blocks=8)
    heard = Heard()
    engine.submit(make_submit(0, [1] * 20, max_tokens=9))
    heard.hear(engine.step())
    step = engine.steps.begin()
    assert step is not None
    assert engine.cancel(Key(0, 0)) == 6
    assert engine.pool.used == 0
    engine.submit(make_submit(1, [2] * 25, max_tokens=6))
    following = engine.steps.begin()  # in the batch row and in the blocks of the other
    assert following is not None
    for it in (step, following):
        it.run()
        it.read()
    heard.hear(engine.steps.finish(step))
    heard.hear(engine.steps.finish(following))
    finish_all(engine, heard)
    assert len(heard.ids(0)) == 1
    assert heard.ids(1) == plain(make_submit(1, [2] * 25, max_tokens=6))[0]


def test_a_mover_gets_no_block_that_a_step_in_flight_writes_to() -> None:
    engine, model = toy_engine(blocks=8)
    engine.submit(make_submit(0, [1] * 20, max_tokens=9))
    engine.step()
    kv_import = replace(make_submit(1, [2] * 25, max_tokens=6), kv_from=KV_FROM)
    engine.submit(kv_import)
    engine.kv_imports.ticket(Key(0, 1), b"t")
    step = engine.steps.begin()
    assert step is not None
    engine.cancel(Key(0, 0))
    assert engine.steps.begin() is None  # it reserves, and has nothing to compute
    assert engine.kv_imports.take_pulls() == []
    step.run()
    step.read()
    engine.steps.finish(step)
    [pull] = engine.kv_imports.take_pulls()
    assert [place for place, _ in pull.wanted] == list(range(7))
    written = {block for _, block in pull.wanted}
    assert (model.cells[sorted(written)] != 0xDEAD).any(), "the step did write to some of them"
    assert engine.kv_imports.ended(Key(0, 1), arrived=False) is None
    engine.go_on(Key(0, 1), [])
    assert finish_all(engine).ids(1) == plain(make_submit(1, [2] * 25, max_tokens=6))[0]


def test_adopted_blocks_are_written_to_once_the_steps_in_flight_have_ended() -> None:
    engine, _ = toy_engine(blocks=8)
    engine.submit(make_submit(0, [1] * 20, max_tokens=9))
    engine.step()
    assert engine.steps.ended_check()(), "none is in flight"
    steps = [engine.steps.begin(), engine.steps.begin()]
    engine.cancel(Key(0, 0))
    assert len(engine.pinned.adopt([b"x" * 16], [-1]).wanted) == 1
    may_write = engine.steps.ended_check()
    for step in steps:
        assert step is not None
        assert not may_write()
        step.run()
        step.read()
        engine.steps.finish(step)
    assert may_write()
    engine.submit(make_submit(1, [2] * 5, max_tokens=9))
    engine.steps.begin()
    assert may_write(), "a later one knows the blocks as taken"


def test_a_failed_step_fails_its_own_and_not_those_that_the_next_one_began() -> None:
    engine, model = toy_engine()
    engine.submit(make_submit(0, [1] * 5, max_tokens=9))
    engine.step()
    step = engine.steps.begin()
    engine.submit(make_submit(1, [2] * 5, max_tokens=4))
    following = engine.steps.begin()
    assert step is not None and following is not None
    model.fail_next = RuntimeError("now")
    for it in (step, following):
        it.run()
        it.read()
    result = engine.steps.finish(step)
    assert [failed.request for failed in result.of(0).failed] == [0]
    assert "RuntimeError: now" in result.of(0).failed[0].message
    after = engine.steps.finish(following)
    assert [output.request for output in after.of(0).outputs] == [1]
    assert after.of(0).failed == []
    heard = Heard()
    heard.hear(after)
    finish_all(engine, heard)
    assert heard.ids(1) == plain(make_submit(1, [2] * 5, max_tokens=4))[0]


def test_the_step_after_one_that_failed_computes_nothing_of_it() -> None:
    """The layer that drafts had said which keys it would write."""
    engine, model = make_engine(2, agreement=1.0)
    engine.submit(make_submit(0, [1] * 5, max_tokens=9))
    engine.step()
    step = engine.steps.begin()
    other = make_submit(1, [2] * 5, max_tokens=4)
    engine.submit(other)
    following = engine.steps.begin()
    assert step is not None and following is not None
    model.fail_next_draft = RuntimeError("now")
    rows = 0
    for it in (step, following):
        rows = model.rows
        it.run()
        it.read()
    assert model.rows - rows == 5
    assert [failed.request for failed in engine.steps.finish(step).of(0).failed] == [0]
    heard = Heard()
    heard.hear(engine.steps.finish(following))
    assert finish_all(engine, heard).ids(1) == plain(other)[0]


def test_a_second_failure_finds_nobody_left_to_fail() -> None:
    engine, model = toy_engine()
    engine.submit(make_submit(0, [1] * 5, max_tokens=9))
    engine.step()
    step, following = engine.steps.begin(), engine.steps.begin()
    assert step is not None and following is not None
    model.fail_next = RuntimeError("now")
    for it in (step, following):
        it.run()
        it.read()
    assert len(engine.steps.finish(step).of(0).failed) == 1
    assert engine.steps.finish(following).of(0).failed == []
    assert engine.pool.used == 0


@pytest.mark.parametrize("scores", [None, 1])
def test_one_preempted_in_flight_keeps_the_token_that_was_coming(scores: int | None) -> None:
    """The pool is full while the newest of them ends its prompt."""
    engine, _ = toy_engine(blocks=6, batched=10, prefix_cache=False)
    first = make_submit(0, [1] * 6, max_tokens=8)
    second = make_submit(1, [2] * 12, max_tokens=6, sampling=Sampling(prompt_logprobs=scores))
    heard = Heard()
    engine.submit(first)
    heard.hear(engine.step())
    engine.submit(second)
    preempted_in_flight = False
    step = engine.steps.begin()
    while step is not None:
        before = engine.stages.preemptions
        following = engine.steps.begin() if engine.steps.may_begin and not engine.idle else None
        preempted_in_flight |= engine.stages.preemptions > before
        step.run()
        step.read()
        heard.hear(engine.steps.finish(step))
        engine.check()
        step = following or (None if engine.idle else engine.steps.begin())
    assert preempted_in_flight
    for submit in (first, second):
        assert heard.ids(submit.request) == plain(replace(submit, sampling=Sampling()))[0]
    entries = heard.outputs[1][0].prompt_logprobs
    assert (entries is None) == (scores is None)
    assert entries is None or len(entries) == 11


def test_one_that_gives_way_to_nobody_waits_for_the_token_that_was_coming() -> None:
    """The rest of the pool waits for KV: the only one that runs needs one block more."""
    engine, _ = toy_engine(blocks=6, prefix_cache=False)
    engine.submit(replace(make_submit(1, [2] * 4), kv_from=KV_FROM))
    engine.kv_imports.ticket(Key(0, 1), b"t")
    assert engine.steps.begin() is None
    [_pull] = engine.kv_imports.take_pulls()
    submit = make_submit(0, [1] * 15, max_tokens=9)
    engine.submit(submit)
    heard = Heard()
    while len(heard.ids(0)) < 5:  # that and the prompt fill five blocks
        heard.hear(engine.step())
    step = engine.steps.begin()
    assert step is not None
    assert engine.steps.begin() is None
    assert engine.stages.preemptions == 1
    assert not engine.steps.may_begin
    step.run()
    step.read()
    heard.hear(engine.steps.finish(step))
    engine.cancel(Key(0, 1))
    engine.kv_imports.ended(Key(0, 1), arrived=False)
    assert finish_all(engine, heard).ids(0) == plain(submit)[0]


def test_the_step_after_a_chunk_that_others_pull_waits_for_its_end() -> None:
    engine, _ = toy_engine(batched=8)
    engine.submit(make_submit(0, [1] * 20, max_tokens=9, lease_ms=1000))
    step = engine.steps.begin()
    assert step is not None
    assert not engine.steps.may_begin
    step.run()
    step.read()
    engine.steps.finish(step)
    assert engine.steps.may_begin


def test_steps_end_in_the_order_of_their_beginning() -> None:
    engine, _ = toy_engine()
    engine.submit(make_submit(0, [1] * 5, max_tokens=9))
    step, following = engine.steps.begin(), engine.steps.begin()
    assert step is not None and following is not None
    assert not engine.steps.may_begin, "two are enough"
    with pytest.raises(AssertionError, match="in their order"):
        engine.steps.finish(following)


def test_another_hash_key_while_steps_are_in_flight_changes_no_answer() -> None:
    engine, _ = toy_engine()
    engine.submit(make_submit(0, [1] * 13, max_tokens=20))
    heard = Heard()
    for number in range(4):
        step, following = engine.steps.begin(), engine.steps.begin()
        assert step is not None
        engine.use_hasher(ToyHasher(BLOCK, key=bytes([number])))
        for it in (step, following):
            if it is not None:
                it.run()
                it.read()
                heard.hear(engine.steps.finish(it))
                engine.check()
    finish_all(engine, heard)
    assert heard.ids(0) == plain(make_submit(0, [1] * 13, max_tokens=20))[0]
    held = {bytes(name) for name in engine.pool.names()}
    tokens = np.array([1] * 13 + heard.ids(0)[:-1], np.int32)
    assert held == set(ToyHasher(BLOCK, key=bytes([3])).follow(None, tokens, b""))


def test_abandoned_in_flight_they_fail_and_what_the_step_gives_is_dropped() -> None:
    engine, _ = toy_engine()
    engine.submit(make_submit(0, [1] * 5, max_tokens=9))
    step = engine.steps.begin()
    assert step is not None
    gone = engine.abandon(FailureKind.DRAINING, "no time")
    assert len(gone.of(0).failed) == 1
    step.run()
    step.read()
    assert engine.steps.finish(step).answers == {}
    assert engine.empty and engine.pool.used == 0


def test_a_deadline_that_passes_in_flight_ends_with_what_there_was() -> None:
    engine, _ = toy_engine()
    engine.submit(make_submit(0, [1] * 5, max_tokens=9, deadline_ms=1000))
    heard = Heard()
    heard.hear(engine.step(0.1))
    step = engine.steps.begin()
    assert step is not None
    heard.hear(engine.expire(5.0))
    step.run()
    step.read()
    heard.hear(engine.steps.finish(step, 5.1))
    assert (len(heard.ids(0)), heard.finish(0)) == (1, "cancelled")
    assert engine.empty

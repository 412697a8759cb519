"""What the prefill side of a split request holds, and until when: one rule a test."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engine.cache.kv_export import KvExport
from headrace.engine.engine import Engine
from headrace.models import Batch
from headrace.wire.frames import Sampling
from headrace_kernels.ops import Fence, Progress
from helpers.engine.legs import BLOCK, PROMPT, D, P, exported, legs, make_engine, run, truth
from helpers.engine.pair import Heard, split, unsplit
from helpers.engine.toy import ToyHasher, ToyModel, make_submit
from helpers.engine.toy_engine import engine_on


def test_an_export_holds_its_blocks_and_no_batch_row_after_its_first_token() -> None:
    engine = make_engine(sequences=1)
    export, heard = exported(engine)
    assert (heard.ids, heard.finish, heard.freed) == (truth()[:1], None, None)
    assert (engine.load.running, engine.load.blocks_used) == (0, 3)
    assert engine.idle and not engine.empty
    assert all(export.ready(place, group) for place in range(3) for group in (0, 1))
    engine.submit(make_submit(9, [1, 2], max_tokens=2))
    assert len(run(engine, 9).ids) == 2
    assert engine.released(P) == 3
    assert engine.released(P) is None
    assert engine.empty
    engine.check_idle()


def test_a_lease_runs_from_the_first_token_and_ends_by_itself() -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0], now_s=5.0)
    engine.step(10.0)
    assert engine.next_deadline_s == math.inf
    engine.step(20.0)
    assert engine.next_deadline_s == pytest.approx(21.0, abs=0.5)
    [export] = engine.kv_exports.take()
    assert not engine.expire(20.9).answers
    heard = Heard()
    heard.hear(engine.expire(25.0), P.request)
    assert (heard.freed, heard.finish, export.revoked) == (3, None, True)
    assert engine.empty and engine.next_deadline_s == math.inf
    engine.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_export_is_revoked(steps: int) -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0])
    for _ in range(steps):
        engine.step()
    exports = engine.kv_exports.take()
    assert engine.cancel(P) == (3 if steps else 0)
    assert all(export.revoked for export in exports) and len(exports) == min(steps, 1)
    engine.check_idle()
    assert engine.empty


def test_an_export_that_was_cancelled_is_not_offered() -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0])
    engine.step()
    engine.cancel(P)
    assert engine.kv_exports.take() == []


@pytest.mark.parametrize("stops", [True, False])
def test_an_answer_that_ends_with_its_first_token_needs_nobody_else(stops: bool) -> None:
    submit = make_submit(0, PROMPT, max_tokens=8 if stops else 1, stop_ids=truth()[: int(stops)])
    engine = make_engine()
    engine.submit(legs(submit)[0])
    heard = run(engine, P.request)
    assert (heard.finish, heard.freed) == ("stop" if stops else "length", 3)
    assert engine.kv_exports.take() == []
    engine.check_idle()


def test_a_puller_may_have_it_all_before_the_first_token_is_out() -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0])
    engine.step()
    assert engine.released(P) is None
    heard = Heard()
    heard.hear(engine.step(), P.request)
    assert (len(heard.ids), heard.freed) == (1, 3)
    engine.check_idle()


def test_parts_of_an_export_are_ready_group_by_group_while_a_step_runs() -> None:
    engine = make_engine(batched=8)
    seen: list[list[int]] = []

    def look() -> None:
        for export in taken or engine.kv_exports.take():
            taken[:] = [export]
            seen.append([sum(export.ready(place, group) for place in range(3)) for group in (0, 1)])

    taken: list[KvExport] = []
    engine.kv_exports.alarm.call = look
    engine.submit(legs()[0])
    engine.step()
    engine.step()
    # The step begins, each group of two chunks is written, the step is committed.
    assert seen == [[0, 0], [2, 0], [2, 2], [2, 2], [2, 2], [3, 2], [3, 3], [3, 3]]


class Slow:
    """A fence that is passed when somebody waits for it."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_where_the_device_runs_behind_a_part_is_ready_once_its_fence_is_passed() -> None:
    fences: list[Slow] = []
    states: list[tuple[bool, bool]] = []

    class Behind(ToyModel):
        def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
            def later(groups: int, fence: Fence | None = None) -> None:
                assert progress is not None and fence is None
                fences.append(Slow())
                progress(groups, fences[-1])

            logits = super().forward(batch, later)
            [export] = engine.kv_exports.take()
            for fence in (None, *fences):
                if fence is not None:
                    fence.passed = True
                states.append((export.ready(0, 0), export.ready(0, 1)))
            return logits

    engine = engine_on(Behind(), blocks=8)
    engine.submit(legs()[0])
    engine.step()
    assert states == [(False, False), (True, False), (True, True)]


class LateModel(ToyModel):
    """Its device writes nothing before somebody waits for it."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.queued: list[Batch] = []
        self.waits = 0
        self.before_wait = lambda: None

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        if len(batch.logit_rows) == 0 or self.fails:
            self.queued.append(batch)
        if progress is not None:
            for group in (1, 2):
                progress(group, Slow())
        if self.fails:
            raise RuntimeError("in the middle")
        if self.queued:
            return torch.zeros((0, self.vocab_size))
        return super().forward(batch)

    def fence(self) -> Fence:
        return self

    def query(self) -> bool:
        return not self.queued

    def synchronize(self) -> None:
        self.waits += 1
        self.before_wait()
        for batch in self.queued:
            super().forward(batch)
        self.queued = []


def late_engine(model: LateModel) -> Engine:
    return engine_on(model, blocks=16, sequences=4, batched=8)


def test_a_chunk_that_chooses_no_token_counts_once_the_device_has_written_it() -> None:
    model = LateModel()
    engine = late_engine(model)
    exports: list[KvExport] = []

    def whole() -> list[bool]:
        return [export.ready(place, g) for export in exports for place in (0, 1) for g in (0, 1)]

    def look() -> None:
        exports.extend(engine.kv_exports.take())
        assert whole() == [False] * 4
        assert engine.pool.names() == []

    model.before_wait = look
    engine.submit(legs()[0])
    engine.step()
    assert whole() == [True] * 4
    assert len(engine.pool.names()) == 2
    assert (model.query(), model.waits) == (True, 1)
    assert engine.cancel(P) == 3  # nobody writes to these any more


def test_a_chunk_that_chooses_a_token_waits_for_the_device_no_second_time() -> None:
    model = LateModel()
    engine = late_engine(model)
    engine.submit(make_submit(1, PROMPT, max_tokens=4))
    assert run(engine, 1).ids == truth()[:4]
    assert model.waits == 1


def test_blocks_of_a_failed_step_are_freed_once_the_device_is_done_with_them() -> None:
    model = LateModel(fails=True)
    engine = late_engine(model)
    engine.submit(legs()[0])
    heard = Heard()
    heard.hear(engine.step(), P.request)
    assert heard.failed is not None and heard.freed == 3
    assert (model.query(), model.waits) == (True, 1)


def test_exports_keep_their_own_copy_of_what_is_cached() -> None:
    engine = make_engine()
    prompt = PROMPT[:8]  # its last block is computed though it is cached
    unsplit(engine, make_submit(0, prompt, max_tokens=1))
    names = ToyHasher(BLOCK).follow(None, np.array(prompt, np.int32), b"")
    cached = engine.pool.match(names)[-1]
    export, _ = exported(engine, make_submit(0, prompt))
    assert cached not in export.blocks
    assert engine.pool.used == 3  # its two, and the twin of its last one
    assert engine.released(P) == 2
    assert engine.pool.cached == 2
    engine.check()


def test_exports_are_never_preempted() -> None:
    engine = make_engine(blocks=12, batched=8)
    for request in (3, 4):
        engine.submit(make_submit(request, [request] * 8, max_tokens=30))
    engine.step()
    engine.submit(legs()[0])
    heard: dict[int, Heard] = {request: Heard() for request in (1, 3, 4)}
    blocks: set[tuple[int, ...]] = set()
    freed = None
    while engine.load.running or not engine.idle:
        result = engine.step()
        for request, one in heard.items():
            one.hear(result, request)
        for export in engine.kv_exports.take():
            blocks.add(export.blocks)
        if heard[1].ids and freed is None:
            freed = engine.released(P)
        engine.check()
    assert engine.stages.preemptions > 0
    assert len(blocks) == 1
    assert freed == 3


def test_a_failed_step_revokes_the_exports_in_it() -> None:
    engine = make_engine()
    engine.submit(legs()[0])
    assert isinstance(engine.model, ToyModel)
    engine.model.fail_next = RuntimeError("now")
    heard = Heard()
    heard.hear(engine.step(), P.request)
    assert heard.failed is not None and heard.freed == 3
    assert engine.kv_exports.take() == []


def test_prompt_logprobs_come_from_the_side_that_computes_the_prompt() -> None:
    submit = make_submit(0, PROMPT, sampling=Sampling(prompt_logprobs=1))
    whole = unsplit(make_engine(), submit)
    heard = split(make_engine(), make_engine(), submit)
    assert heard.ids == whole.ids
    assert heard.first is not None and whole.first is not None
    assert heard.first.prompt_logprobs == whole.first.prompt_logprobs
    engine = make_engine()
    unsplit(engine, make_submit(0, PROMPT))
    engine.submit(legs(submit)[1])
    engine.go_on(D, [])
    assert run(engine).first == replace(whole.first, request=D.request)

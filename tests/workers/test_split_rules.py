"""What each side of a split request holds, and until when: one rule a test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.export import Export
from headrace.engine.sequence import Key
from headrace.frames import Sampling, Submit
from headrace.models import Batch
from headrace_kernels.ops import Fence, Progress
from helpers.pair import KV_FROM, Heard, legs_of, move, split, unsplit
from helpers.toy import ToyModel, ToyNamer, make_submit

BLOCK = 4
P, D = Key(0, 1), Key(0, 2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]  # three blocks, the last one full in part


def make_engine(
    *, blocks: int = 64, sequences: int = 8, batched: int = 16, waiting: int = 100
) -> Engine:
    model = ToyModel(block_tokens=BLOCK)
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=batched,
        max_waiting=waiting,
    )
    return Engine(model, config, ToyNamer(BLOCK))


def legs(submit: Submit | None = None) -> tuple[Submit, Submit]:
    return legs_of(submit or make_submit(0, PROMPT), P.request, D.request)


def exported(engine: Engine, submit: Submit | None = None) -> tuple[Export, Heard]:
    """An export whose first token is out."""
    engine.submit(legs(submit)[0])
    heard = Heard()
    while not engine.idle:
        heard.hear(engine.step(), P.request)
        engine.check()
    [export] = engine.take_exports()
    return export, heard


def reserved(engine: Engine, submit: Submit | None = None) -> list[tuple[int, int]]:
    """An arriving request that has its blocks; what it wants."""
    engine.submit(legs(submit)[1])
    engine.ticket(D)
    engine.step()
    engine.check()
    [pull] = engine.take_pulls()
    assert pull.key == D
    return pull.wanted


def run(engine: Engine, request: int = D.request, heard: Heard | None = None) -> Heard:
    heard = heard or Heard()
    while not engine.idle:
        heard.hear(engine.step(), request)
        engine.check()
    return heard


def truth(submit: Submit | None = None) -> list[int]:
    return unsplit(make_engine(), submit or make_submit(0, PROMPT)).ids


# --- exports ---


def test_an_export_holds_its_blocks_and_no_seat_after_its_first_token() -> None:
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
    assert engine.next_deadline_s is None
    engine.step(20.0)
    assert engine.next_deadline_s == pytest.approx(21.0, abs=0.5)
    [export] = engine.take_exports()
    assert not engine.expire(20.9).answers
    heard = Heard()
    heard.hear(engine.expire(25.0), P.request)
    assert (heard.freed, heard.finish, export.revoked) == (3, None, True)
    assert engine.empty and engine.next_deadline_s is None
    engine.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_export_is_revoked(steps: int) -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0])
    for _ in range(steps):
        engine.step()
    exports = engine.take_exports()
    assert engine.cancel(P) == (3 if steps else 0)
    assert all(export.revoked for export in exports) and len(exports) == min(steps, 1)
    engine.check_idle()
    assert engine.empty


def test_an_export_that_was_cancelled_is_not_offered() -> None:
    engine = make_engine(batched=8)
    engine.submit(legs()[0])
    engine.step()
    engine.cancel(P)
    assert engine.take_exports() == []


@pytest.mark.parametrize("stops", [True, False])
def test_an_answer_that_ends_with_its_first_token_needs_nobody_else(stops: bool) -> None:
    submit = make_submit(0, PROMPT, max_tokens=8 if stops else 1, stop_ids=truth()[: int(stops)])
    engine = make_engine()
    engine.submit(legs(submit)[0])
    heard = run(engine, P.request)
    assert (heard.finish, heard.freed) == ("stop" if stops else "length", 3)
    assert engine.take_exports() == []
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
        for export in taken or engine.take_exports():
            taken[:] = [export]
            seen.append([sum(export.ready(place, group) for place in range(3)) for group in (0, 1)])

    taken: list[Export] = []
    engine.alarm.call = look
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
            [export] = engine.take_exports()
            for fence in (None, *fences):
                if fence is not None:
                    fence.passed = True
                states.append((export.ready(0, 0), export.ready(0, 1)))
            return logits

    model = Behind(block_tokens=BLOCK)
    model.allocate_kv(8)
    engine = Engine(model, EngineConfig(num_blocks=8, block_tokens=BLOCK), ToyNamer(BLOCK))
    engine.submit(legs()[0])
    engine.step()
    assert states == [(False, False), (True, False), (True, True)]


class LateModel(ToyModel):
    """Its device writes nothing before somebody waits for it."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(block_tokens=BLOCK)
        self.allocate_kv(16)
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
    config = EngineConfig(num_blocks=16, block_tokens=BLOCK, max_sequences=4, max_batched_tokens=8)
    return Engine(model, config, ToyNamer(BLOCK))


def test_a_chunk_that_chooses_no_token_counts_once_the_device_has_written_it() -> None:
    model = LateModel()
    engine = late_engine(model)
    exports: list[Export] = []

    def whole() -> list[bool]:
        return [export.ready(place, g) for export in exports for place in (0, 1) for g in (0, 1)]

    def look() -> None:
        exports.extend(engine.take_exports())
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
    names = ToyNamer(BLOCK).follow(None, np.array(prompt, np.int32), b"")
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
        for export in engine.take_exports():
            blocks.add(export.blocks)
        if heard[1].ids and freed is None:
            freed = engine.released(P)
        engine.check()
    assert engine.scheduler.preemptions > 0
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
    assert engine.take_exports() == []


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


# --- arrivals ---


def test_an_arriving_request_holds_nothing_before_its_ticket() -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    assert engine.idle and not engine.empty
    engine.step()
    assert engine.take_pulls() == []
    assert (engine.load.blocks_used, engine.load.waiting, engine.waiting_tokens) == (0, 0, 0)
    engine.ticket(D)
    engine.ticket(D)
    assert not engine.idle
    assert (engine.load.waiting, engine.waiting_tokens) == (0, 0)
    engine.step()
    [pull] = engine.take_pulls()
    assert (len(pull.wanted), pull.tokens) == (3, 11)
    assert engine.take_pulls() == []
    assert engine.idle and engine.load.blocks_used == 3
    assert engine.cancel(D) is None
    assert engine.pull_failed(D) == 3
    engine.check_idle()


@pytest.mark.parametrize("go_first", [True, False])
def test_kv_and_first_token_come_in_any_order(go_first: bool) -> None:
    prefill, decode = make_engine(), make_engine()
    export, heard = exported(prefill)
    decode.submit(legs()[1])
    decode.ticket(D)
    decode.step()
    [pull] = decode.take_pulls()
    move(prefill, export, decode, pull)
    if go_first:
        decode.go_on(D, heard.ids)
        assert decode.idle
        assert decode.pulled(D) is None
    else:
        assert decode.pulled(D) is None
        assert decode.idle
        decode.go_on(D, heard.ids)
    decode.go_on(D, [7])  # again: no effect
    decode.pulled(D)
    decode.ticket(D)
    assert heard.ids + run(decode).ids == truth()
    decode.check_idle()


def test_only_what_the_own_cache_lacks_is_wanted_also_of_the_last_block() -> None:
    for length, cached, wanted in ((11, 8, 1), (8, 8, 0), (12, 12, 0), (9, 8, 1)):
        engine = make_engine()
        prompt = (PROMPT * 2)[:length]
        unsplit(engine, make_submit(0, prompt, max_tokens=2))
        prefill = make_engine()
        export, heard = exported(prefill, make_submit(0, prompt))
        engine.submit(legs(make_submit(0, prompt))[1])
        engine.ticket(D)
        engine.step()
        [pull] = engine.take_pulls()
        assert [place for place, _ in pull.wanted] == list(range(len(export.blocks)))[
            len(export.blocks) - wanted :
        ]
        move(prefill, export, engine, pull)
        engine.pulled(D)
        engine.go_on(D, heard.ids)
        answer = run(engine)
        assert answer.first is not None
        assert answer.first.cached_tokens == cached
        assert heard.ids + answer.ids == truth(make_submit(0, prompt))


def test_what_arrives_is_cached_for_others() -> None:
    prefill, decode = make_engine(), make_engine()
    split(prefill, decode, make_submit(0, PROMPT))
    decode.take_events()
    decode.submit(make_submit(7, PROMPT, max_tokens=1))
    first = run(decode, 7).first
    assert first is not None and first.cached_tokens == 8


def test_nobody_waits_for_the_pull_of_another() -> None:
    """Its source may take long yet, and their first tokens may be with their clients."""
    prefill, decode = make_engine(), make_engine()
    export, heard = exported(prefill)
    keys = [Key(0, request) for request in (D.request, 3, 5)]
    for key in keys:
        decode.submit(replace(make_submit(key.request, PROMPT), kv_from=KV_FROM))
    for key in keys[:2]:
        decode.ticket(key)
    decode.step()
    slow, quick = decode.take_pulls()
    assert (slow.key, quick.key) == (keys[0], keys[1])
    assert len(quick.wanted) == 3
    decode.go_on(keys[2], heard.ids)  # it gets no ticket in time
    decode.expire(1.0)
    decode.submit(make_submit(4, PROMPT))
    alone, late = Heard(), Heard()
    while not decode.idle:
        result = decode.step()
        alone.hear(result, 4)
        late.hear(result, keys[2].request)
        decode.check()
    assert (alone.ids, heard.ids + late.ids) == (truth(), truth())
    move(prefill, export, decode, quick)
    decode.pulled(keys[1])
    decode.go_on(keys[1], heard.ids)
    assert heard.ids + run(decode, 3).ids == truth()
    move(prefill, export, decode, slow)
    decode.pulled(keys[0])
    decode.go_on(keys[0], heard.ids)
    assert decode.pool.used == 3  # the others' two blocks and its own last one
    assert heard.ids + run(decode).ids == truth()
    decode.check_idle()


def test_what_is_computed_here_is_not_pulled_before_the_first_token_is_there() -> None:
    engine = make_engine(sequences=4, batched=4)
    prompt = list(range(16))
    engine.submit(make_submit(7, prompt))
    engine.submit(legs(make_submit(0, prompt))[1])
    engine.ticket(D)
    engine.step()
    engine.step()
    assert engine.take_pulls() == []
    engine.go_on(D, [1])
    engine.step()
    [pull] = engine.take_pulls()
    assert [place for place, _ in pull.wanted] == [2, 3]
    engine.check()


@pytest.mark.parametrize("when", ["before the ticket", "before the blocks", "in the pull", "after"])
@pytest.mark.parametrize("first", [True, False])
def test_a_request_whose_kv_does_not_come_computes_it(when: str, first: bool) -> None:
    prefill, decode = make_engine(), make_engine()
    export, heard = exported(prefill)
    tokens = heard.ids if first else []
    decode.submit(legs()[1])
    if when == "before the ticket":
        assert decode.pull_failed(D) is None
        decode.ticket(D)  # too late
        assert decode.idle
        decode.go_on(D, tokens)
    else:
        decode.ticket(D)
        if when == "before the blocks":
            assert decode.pull_failed(D) is None
            decode.step()
            assert decode.take_pulls() == []
            decode.go_on(D, tokens)
        else:
            decode.step()
            [pull] = decode.take_pulls()
            if when == "in the pull":
                decode.go_on(D, tokens)
                assert decode.idle  # somebody may still write
                decode.pull_failed(D)
            else:
                move(prefill, export, decode, pull)
                decode.pulled(D)
                decode.pull_failed(D)  # no effect
                decode.go_on(D, tokens)
    assert not decode.idle
    if not first:
        heard = Heard()
    assert run(decode, heard=heard).ids == truth()
    decode.check_idle()


def test_a_pull_that_ended_well_after_its_source_was_lost_is_a_cache_hit() -> None:
    prefill, decode = make_engine(), make_engine()
    export, _ = exported(prefill)
    decode.submit(legs()[1])
    decode.ticket(D)
    decode.step()
    [pull] = decode.take_pulls()
    decode.go_on(D, [])
    move(prefill, export, decode, pull)
    assert decode.pulled(D) is None
    result = decode.step()
    assert result.prefill_tokens == 3
    heard = Heard()
    heard.hear(result, D.request)
    assert run(decode, heard=heard).ids == truth()


def test_a_pull_that_has_not_begun_in_time_is_given_up() -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    engine.go_on(D, truth()[:1], 5.0)
    assert engine.idle and engine.next_deadline_s == 6.0
    engine.expire(5.9)
    assert engine.idle
    engine.expire(6.0)
    assert not engine.idle and engine.next_deadline_s is None
    engine.ticket(D)
    assert run(engine).ids == truth()[1:]


def test_cancels_give_blocks_back_when_nobody_writes_to_them() -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    assert engine.cancel(D) == 0  # without a ticket
    engine.submit(legs()[1])
    engine.ticket(D)
    assert engine.cancel(D) == 0  # without blocks
    engine.submit(legs()[1])
    engine.ticket(D)
    engine.step()
    assert engine.cancel(D) == 3  # reserved, and nobody knows
    assert engine.take_pulls() == []
    for end in (engine.pulled, engine.pull_failed):
        reserved(engine)
        assert engine.cancel(D) is None
        assert engine.cancel(D) is None
        with pytest.raises(RequestError) as caught:
            engine.submit(legs()[1])
        assert caught.value.kind == "duplicate_request"
        assert (engine.pool.used, engine.empty) == (3, False)
        engine.check()
        assert end(D) == 3
        assert end(D) is None
        engine.check_idle()
        assert engine.empty
    reserved(engine)
    engine.pulled(D)
    assert engine.cancel(D) == 3  # arrived
    assert engine.cancel_link(0) == 0
    assert engine.pool.used == 0


def test_a_deadline_ends_a_request_in_its_pull_and_blocks_follow() -> None:
    engine = make_engine()
    submit = make_submit(0, PROMPT, deadline_ms=500)
    reserved(engine, submit)
    heard = Heard()
    heard.hear(engine.expire(1.0), D.request)
    assert (heard.finish, heard.freed) == ("cancelled", None)
    engine.check()
    assert engine.pull_failed(D) == 3
    engine.check_idle()


def test_abandoned_requests_fail_and_exports_are_only_freed() -> None:
    prefill, decode = make_engine(), make_engine()
    exported(prefill)
    heard = Heard()
    heard.hear(prefill.abandon(FailureKind.DRAINING, "bye"), P.request)
    assert (heard.failed, heard.freed) == (None, 3)
    reserved(decode)
    heard = Heard()
    heard.hear(decode.abandon(FailureKind.DRAINING, "bye"), D.request)
    assert heard.failed is not None and heard.freed is None
    assert decode.pull_failed(D) == 3
    prefill.check_idle()
    decode.check_idle()


def test_another_hash_key_in_the_middle_of_a_pull_changes_no_answer() -> None:
    prefill, decode = make_engine(), make_engine()
    unsplit(decode, make_submit(0, PROMPT[:5], max_tokens=2))
    prefill.submit(legs()[0])
    heard = run(prefill, P.request)
    [export] = prefill.take_exports()
    decode.submit(legs()[1])
    decode.ticket(D)
    decode.step()
    [pull] = decode.take_pulls()
    assert len(pull.wanted) == 2
    for engine in (prefill, decode):
        engine.use_namer(ToyNamer(BLOCK, b"other"))
        engine.check()
    move(prefill, export, decode, pull)
    assert prefill.released(P) == 3
    decode.pulled(D)
    decode.go_on(D, heard.ids)
    assert run(decode, heard=heard).ids == truth()
    for engine in (prefill, decode):
        engine.check_idle()
    assert decode.pool.cached > 0


def test_another_hash_key_wakes_those_that_wait() -> None:
    engine = make_engine(blocks=4)
    reserved(engine)
    engine.submit(make_submit(9, [1] * 8, max_tokens=1))
    engine.step()
    assert engine.idle  # no room
    engine.use_namer(ToyNamer(BLOCK, b"other"))
    assert not engine.idle
    engine.step()
    assert engine.idle


def test_one_that_only_lacks_a_seat_loses_no_blocks_to_those_that_need_none() -> None:
    engine = make_engine(blocks=12, sequences=1)
    engine.submit(make_submit(5, [1] * 7, max_tokens=9))  # up to 4 blocks
    engine.step()
    engine.submit(make_submit(6, [2] * 28, max_tokens=2))  # 7 blocks, and no seat
    engine.submit(legs()[1])
    engine.ticket(D)
    engine.step()
    assert engine.take_pulls() == []  # 10 blocks are spoken for
    order: list[int] = []
    while not engine.idle:
        for answers in engine.step().answers.values():
            order += [output.request for output in answers.outputs if output.finish]
        for pull in engine.take_pulls():
            engine.pull_failed(pull.key)
    assert order == [5, 6]


def test_arrived_requests_take_the_next_seat_in_order_and_share_the_pool() -> None:
    """Where all blocks are in arrived ones, the last of them gives way, and is computed again."""
    prefill, decode = make_engine(), make_engine(blocks=6)
    answers: dict[int, Heard] = {}
    pulls = {}
    for request in (11, 12):
        prompt = [request] * 12
        p_leg, d_leg = legs_of(make_submit(0, prompt, max_tokens=6), request, request)
        prefill.submit(p_leg)
        answers[request] = run(prefill, request)
        decode.submit(d_leg)
        decode.ticket(Key(0, request))
    exports = {export.key.request: export for export in prefill.take_exports()}
    decode.scheduler.note_answer(0)
    decode.step()
    pulls = {pull.key.request: pull for pull in decode.take_pulls()}
    if len(pulls) == 1:  # room is kept for what an answer is expected to write
        assert list(pulls) == [11]
    for request, pull in pulls.items():
        move(prefill, exports[request], decode, pull)
        decode.pulled(pull.key)
    for request in (11, 12):
        decode.go_on(Key(0, request), answers[request].ids)
    for _ in range(200):
        if decode.empty:
            break
        result = decode.step(5.0)
        decode.check()
        for request, heard in answers.items():
            heard.hear(result, request)
        for pull in decode.take_pulls():
            move(prefill, exports[pull.key.request], decode, pull)
            decode.pulled(pull.key)
    for request, heard in answers.items():
        assert heard.ids == truth(make_submit(0, [request] * 12, max_tokens=6))


@pytest.mark.parametrize(
    ("generated", "kind"), [([50], "bad_token"), ([-1], "bad_token"), ([1] * 8, "bad_resume")]
)
def test_first_tokens_that_cannot_be_are_refused(generated: list[int], kind: str) -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    with pytest.raises(RequestError) as caught:
        engine.go_on(D, generated)
    assert caught.value.kind == kind
    engine.go_on(D, [])
    assert run(engine).ids == truth()


def test_nobody_minds_frames_for_requests_that_are_gone() -> None:
    engine = make_engine()
    engine.ticket(D)
    engine.go_on(D, [1])
    assert (engine.pulled(D), engine.pull_failed(D), engine.released(P)) == (None, None, None)
    assert engine.cancel(D) == 0
    engine.submit(make_submit(D.request, PROMPT))  # one that does not arrive
    engine.ticket(D)
    engine.go_on(D, [1])
    assert (engine.pulled(D), engine.pull_failed(D), engine.released(D)) == (None, None, None)
    assert run(engine).ids == truth()


def test_those_without_ticket_count_as_waiting_for_the_bound() -> None:
    engine = make_engine(waiting=2)
    engine.submit(legs()[1])
    engine.submit(make_submit(3, [1]))
    with pytest.raises(RequestError) as caught:
        engine.submit(make_submit(4, [1]))
    assert caught.value.kind == "queue_full"


def test_a_leg_cannot_pull_and_hand_off() -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.submit(replace(legs()[0], kv_from=KV_FROM))
    assert caught.value.kind == "unsupported"
    assert engine.empty

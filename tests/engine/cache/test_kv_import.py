"""What the decode side of a split request holds, and until when: one rule a test."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from helpers.engine.legs import (
    BLOCK,
    PROMPT,
    D,
    P,
    exported,
    legs,
    make_engine,
    reserved,
    run,
    truth,
)
from helpers.engine.pair import KV_FROM, Heard, legs_of, move, split, unsplit
from helpers.engine.toy import ToyHasher, make_submit


def test_an_arriving_request_holds_nothing_before_its_ticket() -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    assert engine.idle and not engine.empty
    engine.step()
    assert engine.kv_imports.take_pulls() == []
    assert (engine.load.blocks_used, engine.load.waiting, engine.waiting_tokens) == (0, 0, 0)
    engine.kv_imports.ticket(D, b"t")
    engine.kv_imports.ticket(D, b"t")
    assert not engine.idle
    assert (engine.load.waiting, engine.waiting_tokens) == (0, 0)
    engine.step()
    [pull] = engine.kv_imports.take_pulls()
    assert (len(pull.wanted), pull.tokens) == (3, 11)
    assert engine.kv_imports.take_pulls() == []
    assert engine.idle and engine.load.blocks_used == 3
    assert engine.cancel(D) is None
    assert engine.kv_imports.ended(D, arrived=False) == 3
    engine.check_idle()


@pytest.mark.parametrize("go_first", [True, False])
def test_kv_and_first_token_come_in_any_order(go_first: bool) -> None:
    prefill, decode = make_engine(), make_engine()
    export, heard = exported(prefill)
    decode.submit(legs()[1])
    decode.kv_imports.ticket(D, b"t")
    decode.step()
    [pull] = decode.kv_imports.take_pulls()
    move(prefill, export, decode, pull)
    if go_first:
        decode.go_on(D, heard.ids)
        assert decode.idle
        assert decode.kv_imports.ended(D, arrived=True) is None
    else:
        assert decode.kv_imports.ended(D, arrived=True) is None
        assert decode.idle
        decode.go_on(D, heard.ids)
    decode.go_on(D, [7])  # again: no effect
    decode.kv_imports.ticket(D, b"t")
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
        engine.kv_imports.ticket(D, b"t")
        engine.step()
        [pull] = engine.kv_imports.take_pulls()
        assert [place for place, _ in pull.wanted] == list(range(len(export.blocks)))[
            len(export.blocks) - wanted :
        ]
        move(prefill, export, engine, pull)
        engine.kv_imports.ended(D, arrived=True)
        engine.go_on(D, heard.ids)
        answer = run(engine)
        assert answer.first is not None
        assert answer.first.cached_tokens == cached
        assert heard.ids + answer.ids == truth(make_submit(0, prompt))


def test_what_arrives_is_cached_for_others() -> None:
    prefill, decode = make_engine(), make_engine()
    split(prefill, decode, make_submit(0, PROMPT))
    decode.pool.take_events()
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
        decode.kv_imports.ticket(key, b"t")
    decode.step()
    slow, quick = decode.kv_imports.take_pulls()
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
    decode.kv_imports.ended(keys[1], arrived=True)
    decode.go_on(keys[1], heard.ids)
    assert heard.ids + run(decode, 3).ids == truth()
    move(prefill, export, decode, slow)
    decode.kv_imports.ended(keys[0], arrived=True)
    decode.go_on(keys[0], heard.ids)
    assert decode.pool.used == 3  # the others' two blocks and its own last one
    assert heard.ids + run(decode).ids == truth()
    decode.check_idle()


def test_what_is_computed_here_is_not_pulled_before_the_first_token_is_there() -> None:
    engine = make_engine(sequences=4, batched=4)
    prompt = list(range(16))
    engine.submit(make_submit(7, prompt))
    engine.submit(legs(make_submit(0, prompt))[1])
    engine.kv_imports.ticket(D, b"t")
    engine.step()
    engine.step()
    assert engine.kv_imports.take_pulls() == []
    engine.go_on(D, [1])
    engine.step()
    [pull] = engine.kv_imports.take_pulls()
    assert [place for place, _ in pull.wanted] == [2, 3]
    engine.check()


def test_a_pull_that_ended_well_after_its_source_was_lost_is_a_cache_hit() -> None:
    prefill, decode = make_engine(), make_engine()
    export, _ = exported(prefill)
    decode.submit(legs()[1])
    decode.kv_imports.ticket(D, b"t")
    decode.step()
    [pull] = decode.kv_imports.take_pulls()
    decode.go_on(D, [])
    move(prefill, export, decode, pull)
    assert decode.kv_imports.ended(D, arrived=True) is None
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
    assert not engine.idle and engine.next_deadline_s == math.inf
    engine.kv_imports.ticket(D, b"t")
    assert run(engine).ids == truth()[1:]


def test_cancels_give_blocks_back_when_nobody_writes_to_them() -> None:
    engine = make_engine()
    engine.submit(legs()[1])
    assert engine.cancel(D) == 0  # without a ticket
    engine.submit(legs()[1])
    engine.kv_imports.ticket(D, b"t")
    assert engine.cancel(D) == 0  # without blocks
    engine.submit(legs()[1])
    engine.kv_imports.ticket(D, b"t")
    engine.step()
    assert engine.cancel(D) == 3  # reserved, and nobody knows
    assert engine.kv_imports.take_pulls() == []
    for arrived in (True, False):
        reserved(engine)
        assert engine.cancel(D) is None
        assert engine.cancel(D) is None
        with pytest.raises(RequestError) as caught:
            engine.submit(legs()[1])
        assert caught.value.kind == "duplicate_request"
        assert (engine.pool.used, engine.empty) == (3, False)
        engine.check()
        assert engine.kv_imports.ended(D, arrived=arrived) == 3
        engine.check_idle()
        assert engine.empty
    reserved(engine)
    engine.kv_imports.ended(D, arrived=True)
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
    assert engine.kv_imports.ended(D, arrived=False) == 3
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
    assert decode.kv_imports.ended(D, arrived=False) == 3
    prefill.check_idle()
    decode.check_idle()


def test_another_hash_key_in_the_middle_of_a_pull_changes_no_answer() -> None:
    prefill, decode = make_engine(), make_engine()
    unsplit(decode, make_submit(0, PROMPT[:5], max_tokens=2))
    prefill.submit(legs()[0])
    heard = run(prefill, P.request)
    [export] = prefill.kv_exports.take()
    decode.submit(legs()[1])
    decode.kv_imports.ticket(D, b"t")
    decode.step()
    [pull] = decode.kv_imports.take_pulls()
    assert len(pull.wanted) == 2
    for engine in (prefill, decode):
        engine.use_hasher(ToyHasher(BLOCK, b"other"))
        engine.check()
    move(prefill, export, decode, pull)
    assert prefill.released(P) == 3
    decode.kv_imports.ended(D, arrived=True)
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
    engine.use_hasher(ToyHasher(BLOCK, b"other"))
    assert not engine.idle
    engine.step()
    assert engine.idle


def test_one_that_only_lacks_a_batch_row_loses_no_blocks_to_those_that_need_none() -> None:
    engine = make_engine(blocks=12, sequences=1)
    engine.submit(make_submit(5, [1] * 7, max_tokens=9))  # up to 4 blocks
    engine.step()
    engine.submit(make_submit(6, [2] * 28, max_tokens=2))  # 7 blocks, and no batch row
    engine.submit(legs()[1])
    engine.kv_imports.ticket(D, b"t")
    engine.step()
    assert engine.kv_imports.take_pulls() == []  # 10 blocks are spoken for
    order: list[int] = []
    while not engine.idle:
        for answers in engine.step().answers.values():
            order += [output.request for output in answers.outputs if output.finish]
        for pull in engine.kv_imports.take_pulls():
            engine.kv_imports.ended(pull.key, arrived=False)
    assert order == [5, 6]


def test_arrived_requests_take_the_next_batch_row_in_order_and_share_the_pool() -> None:
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
        decode.kv_imports.ticket(Key(0, request), b"t")
    exports = {export.key.request: export for export in prefill.kv_exports.take()}
    decode.scheduler.admission.note_answer(0)
    decode.step()
    pulls = {pull.key.request: pull for pull in decode.kv_imports.take_pulls()}
    if len(pulls) == 1:  # room is kept for what an answer is expected to write
        assert list(pulls) == [11]
    for request, pull in pulls.items():
        move(prefill, exports[request], decode, pull)
        decode.kv_imports.ended(pull.key, arrived=True)
    for request in (11, 12):
        decode.go_on(Key(0, request), answers[request].ids)
    for _ in range(200):
        if decode.empty:
            break
        result = decode.step(5.0)
        decode.check()
        for request, heard in answers.items():
            heard.hear(result, request)
        for pull in decode.kv_imports.take_pulls():
            move(prefill, exports[pull.key.request], decode, pull)
            decode.kv_imports.ended(pull.key, arrived=True)
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
    engine.kv_imports.ticket(D, b"t")
    engine.go_on(D, [1])
    assert engine.released(P) is None
    assert engine.cancel(D) == 0
    engine.submit(make_submit(D.request, PROMPT))  # one that does not arrive
    engine.kv_imports.ticket(D, b"t")
    engine.go_on(D, [1])
    assert engine.released(D) is None
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

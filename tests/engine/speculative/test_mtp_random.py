"""Drafting engines under random traffic: answers as if each request were alone and undrafted, and no block lost."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sequence import Key
from headrace.wire.frames import Submit
from helpers.engine.drafting_engine import KINDS, Heard, a_submit, make_engine, plain
from helpers.engine.pipeline import Pipeline
from helpers.engine.toy import ToyHasher, make_submit


@given(data=st.data())
def test_random_traffic_is_answered_as_if_nothing_were_drafted(data: st.DataObject) -> None:
    draw = data.draw
    engine, model = make_engine(
        draw(st.integers(1, 3), "k"),
        agreement=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), "agreement"),
        blocks=draw(st.integers(12, 40), "blocks"),
        sequences=draw(st.integers(1, 5), "sequences"),
        batched=draw(st.integers(5, 24), "batched"),
        fixed=draw(st.booleans(), "fixed"),
        some_tokens=draw(st.booleans(), "some tokens"),
        prefix_cache=draw(st.integers(0, 3), "no prefix cache") > 0,
    )
    model.fixed_ms, model.row_ms, model.draft_ms = draw(
        st.sampled_from([(1.0, 0.01, 0.01), (1.0, 1.0, 0.1), (0.1, 1.0, 1.0)]), "costs"
    )
    choose = partial(_one_of, data) if draw(st.booleans(), "steps overlap") else None
    line = Pipeline(engine, choose)
    submits: dict[int, Submit] = {}
    wanted: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    heard = Heard()
    for _ in range(draw(st.integers(5, 40), "turns")):
        turn = draw(st.integers(0, 9))
        if turn < 4 and len(submits) < 10:
            submit = _submit(data, len(submits), wanted)
            submits[submit.request] = submit
            engine.submit(submit)
        elif turn == 4 and submits:
            victim = draw(st.sampled_from(sorted(submits)))
            engine.cancel(Key(0, victim))
            cancelled.add(victim)
        elif turn == 5 and draw(st.integers(0, 9)) == 0:
            engine.use_hasher(ToyHasher(4, key=bytes([len(submits)])))
        else:
            for result in line.turn():
                heard.hear(result)
        engine.check()
    for turn in range(9000):
        if line.idle:
            break
        line.choose = choose and (lambda count, turn=turn: turn % count)
        for result in line.turn():
            heard.hear(result)
        engine.check()
    assert line.idle, "something starves"
    engine.check_idle()
    assert engine.pool.used == 0
    for request in submits:
        got = heard.ids(request)
        if request in cancelled:
            assert got == wanted[request][: len(got)]
        else:
            assert got == wanted[request]


def _one_of(data: st.DataObject, count: int) -> int:
    return data.draw(st.integers(0, count - 1), "act")


def _submit(data: st.DataObject, request: int, wanted: dict[int, list[int]]) -> Submit:
    """Any, some of them with a beginning that others share, some resumed."""
    draw = data.draw
    base = a_submit(draw(st.integers(0, len(KINDS) - 1)), max_tokens=draw(st.integers(1, 16)))
    prompt = [draw(st.integers(0, 1))] * 6 + draw(
        st.lists(st.integers(0, 2), min_size=1, max_size=9)
    )
    submit = make_submit(
        request,
        prompt,
        max_tokens=base.max_tokens,
        sampling=base.sampling,
        stop_ids=base.stop_ids,
        priority=draw(st.integers(0, 1)),
    )
    whole = plain(submit)[0]
    wanted[request] = whole
    if len(whole) > 1 and draw(st.integers(0, 3)) == 0:
        done = draw(st.integers(1, len(whole) - 1))
        wanted[request] = whole[done:]
        return make_submit(
            request,
            prompt,
            max_tokens=base.max_tokens,
            sampling=base.sampling,
            stop_ids=base.stop_ids,
            resumed=whole[:done],
        )
    return submit

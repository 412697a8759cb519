"""The engine on a model whose logits show every mistake with blocks, slots and positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sequence import Key
from headrace.wire.frames import Ranked, Sampling, Submit
from helpers.engine.hearing import Heard, run, true_greedy
from helpers.engine.pipeline import Pipeline
from helpers.engine.toy import ToyHasher, digest, make_submit, toy_logits
from helpers.engine.toy_engine import BLOCK, make_engine


def alone(submit: Submit) -> list[int]:
    """The answer of an engine that has nothing else to do."""
    engine, _ = make_engine(prefix_cache=False)
    engine.submit(submit)
    return run(engine).ids.get(submit.request, [])


def kinds(request: int) -> Sampling:
    return [
        Sampling(),
        Sampling(temperature=1.0, seed=request),
        Sampling(temperature=0.8, top_p=0.9, seed=request, logprobs=2),
        Sampling(temperature=1.2, top_k=10, repetition_penalty=1.2, seed=request),
        Sampling(frequency_penalty=0.7, presence_penalty=0.1, logprobs=0),
    ][request % 5]


def test_greedy_is_what_the_model_says() -> None:
    engine, _ = make_engine()
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6][: n + 1] for n in range(8)]
    for request, prompt in enumerate(prompts):
        engine.submit(make_submit(request, prompt, max_tokens=15))
    heard = run(engine)
    for request, prompt in enumerate(prompts):
        assert heard.ids[request] == true_greedy(prompt, 15)
        assert heard.finish[request] == "length"


@pytest.mark.matrix
@pytest.mark.parametrize("batched", [8, 9, 13, 32])
@pytest.mark.parametrize("blocks", [12, 20, 64])
def test_batching_chunking_and_preemption_change_nothing(batched: int, blocks: int) -> None:
    engine, _ = make_engine(batched=batched, blocks=blocks)
    submits = [
        make_submit(r, [7] * (r % 3) + list(range(r, r + 11)), max_tokens=12, sampling=kinds(r))
        for r in range(15)
    ]
    for submit in submits:
        engine.submit(submit)
    heard = run(engine)
    if blocks == 12:
        assert engine.stages.preemptions > 0
    for submit in submits:
        assert heard.ids[submit.request] == alone(submit)


def test_prefix_cached_answers_are_the_same_and_cheaper() -> None:
    engine, model = make_engine()
    prompt = list(range(30))
    for request in range(3):
        engine.submit(make_submit(request, prompt, sampling=Sampling(temperature=1.0, seed=4)))
        run(engine)
    assert model.rows < 30 + 8 + 2 * (2 + 8) + 1
    heard = Heard()
    engine.submit(make_submit(9, [*prompt[:-1], 49], sampling=Sampling(temperature=1.0, seed=4)))
    run(engine, heard)
    assert heard.first[9].cached_tokens == 28
    assert heard.ids[9] == alone(
        make_submit(9, [*prompt[:-1], 49], sampling=Sampling(temperature=1.0, seed=4))
    )


def test_generated_text_is_cached_too() -> None:
    engine, _ = make_engine()
    prompt = list(range(10))
    engine.submit(make_submit(0, prompt, max_tokens=12))
    answer = run(engine).ids[0]
    engine.submit(make_submit(1, [*prompt, *answer, 3, 4], max_tokens=1))
    heard = run(engine)
    # All full blocks of the 21 tokens whose KV was computed.
    assert heard.first[1].cached_tokens == 20


def test_other_salts_share_nothing() -> None:
    engine, _ = make_engine()
    prompt = list(range(20))
    engine.submit(make_submit(0, prompt, salt=b"a"))
    run(engine)
    engine.submit(make_submit(1, prompt, salt=b"b"))
    assert run(engine).first[1].cached_tokens == 0


def test_a_new_hash_key_forgets_the_cache_and_keeps_what_runs() -> None:
    engine, _ = make_engine()
    prompt = list(range(21))
    engine.submit(make_submit(0, prompt, max_tokens=20))
    heard = run(engine, steps=5)
    engine.use_hasher(ToyHasher(BLOCK, b"other"))
    engine.check()
    engine.submit(make_submit(1, prompt, max_tokens=2))
    run(engine, heard)
    assert heard.first[1].cached_tokens == 20  # named anew by the one that runs
    assert heard.ids[0] == true_greedy(prompt, 20)


def test_n_choices_compute_their_prompt_once() -> None:
    engine, model = make_engine()
    prompt = list(range(23))
    for request in range(4):
        engine.submit(
            make_submit(
                request, prompt, max_tokens=1, sampling=Sampling(temperature=1.0, seed=request)
            )
        )
    run(engine)
    assert model.rows == 23 + 3 * 3


def test_stop_length_and_ignore_eos() -> None:
    prompt = [1, 2, 3]
    answer = true_greedy(prompt, 10)
    stop = answer[4]
    first = answer.index(stop)
    engine, _ = make_engine()
    engine.submit(make_submit(0, prompt, max_tokens=10, stop_ids=[stop]))
    ignoring = Sampling(ignore_eos=True)
    engine.submit(make_submit(1, prompt, max_tokens=10, stop_ids=[stop], sampling=ignoring))
    late = Sampling(min_tokens=7)
    engine.submit(make_submit(2, prompt, max_tokens=30, stop_ids=[stop, 4000], sampling=late))
    heard = run(engine)
    assert (heard.ids[0], heard.finish[0]) == (answer[: first + 1], "stop")
    assert (heard.ids[1], heard.finish[1]) == (answer, "length")
    assert stop not in heard.ids[2][:7]


def test_the_context_ends_an_answer() -> None:
    engine, _ = make_engine(context=20)
    engine.submit(make_submit(0, [1] * 15, max_tokens=1000))
    heard = run(engine)
    assert (len(heard.ids[0]), heard.finish[0]) == (5, "length")


@pytest.mark.parametrize(
    "extreme",
    [
        Sampling(temperature=1e6, top_p=0.5),
        Sampling(temperature=2e-6, top_p=0.5, min_p=1.0),
        Sampling(temperature=1.0, top_k=3, logit_bias=[Ranked(3, 1e6), Ranked(4, -1e6)]),
        Sampling(temperature=0.5, repetition_penalty=1e6, frequency_penalty=1e6),
        Sampling(temperature=1e6, repetition_penalty=1e-6, presence_penalty=-1e6, logprobs=2),
    ],
    ids=str,
)
def test_what_is_allowed_at_the_most_harms_nobody(extreme: Sampling) -> None:
    engine, _ = make_engine()
    engine.submit(make_submit(0, [1, 2], max_tokens=9))
    # masked tokens are infinitely far away
    wanted = replace(extreme, min_tokens=5)
    engine.submit(make_submit(1, [1, 2], max_tokens=9, sampling=wanted, stop_ids=[4, 5]))
    heard = run(engine)
    assert not heard.failed
    assert heard.ids[0] == true_greedy([1, 2], 9)
    assert len(heard.ids[1]) >= 6


@pytest.mark.parametrize("sampling", [kinds(r) for r in range(5)], ids=str)
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(sampling: Sampling) -> None:
    prompt = list(range(9))
    whole = alone(make_submit(0, prompt, max_tokens=14, sampling=sampling))
    for done in (1, 6, 13):
        engine, _ = make_engine()
        resumed = make_submit(0, prompt, max_tokens=14, sampling=sampling, resumed=whole[:done])
        engine.submit(resumed)
        heard = run(engine)
        assert heard.ids[0] == whole[done:]


def test_prompt_logprobs_have_a_row_for_each_token_after_the_first() -> None:
    prompt = [5, 4, 3, 2, 1, 0, 9, 8, 7, 6]
    for batched in (8, 32):
        engine, _ = make_engine(batched=batched)
        engine.submit(make_submit(0, prompt, max_tokens=2))
        run(engine)  # fills the cache, which must not be credited
        wanted = Sampling(prompt_logprobs=2)
        engine.submit(make_submit(1, prompt, max_tokens=3, sampling=wanted))
        engine.submit(make_submit(2, prompt, max_tokens=0, sampling=wanted))
        heard = run(engine)
        assert heard.ids[1] == true_greedy(prompt, 3)
        assert (heard.ids[2], heard.finish[2]) == ([], "length")
        for request in (1, 2):
            first = heard.first[request]
            assert first.cached_tokens == 0
            assert first.prompt_logprobs is not None
            assert len(first.prompt_logprobs) == len(prompt) - 1
            for place, entry in enumerate(first.prompt_logprobs):
                kv = np.array([t * 4096 + i for i, t in enumerate(prompt[: place + 1])])
                exact = torch.log_softmax(torch.from_numpy(toy_logits(digest(kv), 50)), dim=0)
                assert entry.logprob == pytest.approx(float(exact[prompt[place + 1]]), abs=1e-5)
                assert [r.token for r in entry.top] == exact.topk(2).indices.tolist()


@pytest.mark.parametrize("length", [1, 9, 17, 129, 257])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_of_a_prompt_whose_last_token_is_alone_in_its_step(
    length: int, max_tokens: int
) -> None:
    engine, _ = make_engine(blocks=200, batched=8 if length < 129 else 256, context=300)
    engine.submit(make_submit(0, [1, 2, 3], max_tokens=40))  # a batch mate
    heard = Heard()
    heard.hear(engine.step())
    prompt = [place % 50 for place in range(length)]
    wanted = Sampling(prompt_logprobs=1)
    engine.submit(make_submit(1, prompt, max_tokens=max_tokens, sampling=wanted))
    run(engine, heard)
    assert not heard.failed
    assert heard.ids == {0: true_greedy([1, 2, 3], 40), 1: true_greedy(prompt, max_tokens)}
    entries = heard.first[1].prompt_logprobs
    assert entries is not None
    assert len(entries) == length - 1


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    engine, _ = make_engine()
    wanted = Sampling(logprobs=128, prompt_logprobs=128)
    engine.submit(make_submit(0, [1, 2], max_tokens=1, sampling=wanted))
    first = run(engine).first[0]
    assert first.logprobs is not None
    assert first.prompt_logprobs is not None
    for entry in (*first.logprobs, *first.prompt_logprobs):
        assert len({ranked.token for ranked in entry.top}) == 50


def test_load_and_step_numbers_tell_what_happened() -> None:
    engine, _ = make_engine(sequences=1, blocks=16)
    engine.submit(make_submit(0, list(range(9)), max_tokens=2))
    engine.submit(make_submit(1, list(range(20, 26)), max_tokens=1))
    first = engine.step()
    assert (first.step, first.prefill_tokens, first.decode_rows, first.kv_tokens) == (1, 9, 0, 9)
    assert first.prefill_context == sum(range(9))
    assert engine.waiting_tokens == 6
    assert (engine.load.blocks_used, engine.load.running, engine.load.waiting) == (3, 1, 1)
    second = engine.step()
    assert (second.prefill_tokens, second.decode_rows, second.kv_tokens) == (0, 1, 10)
    assert second.prefill_context == 0
    assert engine.load.blocks_cached == 2
    run(engine)
    assert engine.step().step == engine.steps.finished == 3


@given(data=st.data())
def test_random_traffic_is_answered_as_if_each_request_were_alone(data: st.DataObject) -> None:
    engine, model = make_engine(
        blocks=data.draw(st.integers(16, 40)),
        sequences=data.draw(st.integers(1, 6)),
        batched=data.draw(st.integers(6, 24)),
        reads_late=data.draw(st.booleans(), "reads late"),
    )
    one_of = (
        (lambda count: data.draw(st.integers(0, count - 1), "act"))
        if data.draw(st.booleans())
        else None
    )
    line = Pipeline(engine, one_of)
    heard = {0: Heard(), 1: Heard()}
    submits: dict[Key, Submit] = {}
    gone: set[Key] = set()
    for number in range(data.draw(st.integers(1, 10))):
        link = data.draw(st.integers(0, 1))
        prompt = [data.draw(st.integers(0, 1))] * 6 + data.draw(
            st.lists(st.integers(0, 3), min_size=1, max_size=14)
        )
        submit = make_submit(
            number,
            prompt,
            max_tokens=data.draw(st.integers(1, 20)),
            sampling=kinds(number),
            priority=data.draw(st.integers(0, 1)),
        )
        submits[Key(link, number)] = submit
        engine.submit(submit, link=link)
        for _ in range(data.draw(st.integers(0, 5))):
            if data.draw(st.integers(0, 15)) == 0:
                model.fail_next = RuntimeError("now and then")
            for result in line.turn():
                for link, one in heard.items():
                    one.hear(result, link)
            engine.check()
        if data.draw(st.integers(0, 3)) == 0:
            key = data.draw(st.sampled_from(sorted(submits)))
            engine.cancel(key)
            gone.add(key)
    model.fail_next = None
    for turn in count():
        if line.idle:
            break
        line.choose = one_of and (lambda possible, turn=turn: turn % possible)
        for result in line.turn():
            for link, one in heard.items():
                one.hear(result, link)
        engine.check()
    engine.check_idle()
    for key, submit in submits.items():
        got = heard[key.link]
        ended = (key.request in got.finish) + (key.request in got.failed)
        assert ended == 1 or (key in gone and ended == 0)
        whole = alone(submit)
        ids = got.ids.get(key.request, [])
        assert ids == (whole if key.request in got.finish else whole[: len(ids)])

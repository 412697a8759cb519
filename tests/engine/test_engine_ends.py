"""Requests that are refused, cancelled, late or failed: each by its name, and nothing of them stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace import _core
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.wire.frames import Ranked, Sampling, Submit
from helpers.engine.hearing import Heard, run, true_greedy
from helpers.engine.toy import make_submit
from helpers.engine.toy_engine import make_engine


@pytest.mark.parametrize(
    ("submit", "kind"),
    [
        (make_submit(0, []), "empty_prompt"),
        (make_submit(0, [1, 50]), "bad_token"),
        (replace(make_submit(0, [1]), tokens=b"abc"), "bad_token"),
        (make_submit(0, [1] * 257), "too_long"),
        (make_submit(0, [1] * 256), "too_long"),
        (make_submit(0, [1] * 120), "too_big_for_pool"),
        (make_submit(0, [1], sampling=Sampling(temperature=-1.0)), "bad_sampling"),
        (make_submit(0, [1], sampling=Sampling(temperature=1e300)), "bad_sampling"),
        (make_submit(0, [1], sampling=Sampling(repetition_penalty=1e-300)), "bad_sampling"),
        (make_submit(0, [1], sampling=Sampling(frequency_penalty=1e300)), "bad_sampling"),
        (make_submit(0, [1], sampling=Sampling(logit_bias=[Ranked(3, 1e300)])), "bad_sampling"),
        (make_submit(0, [1], max_tokens=0), "bad_sampling"),
        (make_submit(0, [1], max_tokens=2, resumed=[1, 2]), "bad_resume"),
        (make_submit(0, [1], max_tokens=9, resumed=[77]), "bad_token"),
    ],
)
def test_bad_requests_fail_by_name_and_leave_no_trace(submit: Submit, kind: str) -> None:
    engine, _ = make_engine(blocks=30)
    with pytest.raises(RequestError) as caught:
        engine.submit(submit)
    assert caught.value.kind == kind
    assert engine.idle
    engine.check()


def test_duplicates_fail_and_the_first_goes_on() -> None:
    engine, _ = make_engine()
    engine.submit(make_submit(0, [1, 2]))
    with pytest.raises(RequestError) as caught:
        engine.submit(make_submit(0, [3]))
    assert caught.value.kind == "duplicate_request"
    engine.submit(make_submit(0, [3]), link=1)  # another router's request 0
    assert run(engine).ids[0] == true_greedy([1, 2], 8)


def test_the_queue_is_bounded() -> None:
    engine, _ = make_engine(waiting=3)
    for request in range(3):
        engine.submit(make_submit(request, [1]))
    with pytest.raises(RequestError) as caught:
        engine.submit(make_submit(3, [1]))
    assert caught.value.kind == "queue_full"
    assert len(run(engine).ids) == 3


def test_cancel_frees_at_every_stage() -> None:
    engine, _ = make_engine(sequences=2, batched=8)
    for request in range(3):
        engine.submit(make_submit(request, list(range(request, request + 20)), max_tokens=50))
    heard = Heard()
    heard.hear(engine.step())
    assert engine.cancel(Key(0, 2)) == 0  # waiting
    assert engine.cancel(Key(0, 1)) == 5  # in its prompt
    for _ in range(8):
        heard.hear(engine.step())
    assert heard.ids[0]
    assert (engine.cancel(Key(0, 0)) or 0) > 5  # decoding
    assert engine.cancel(Key(0, 0)) == 0  # unknown by now
    assert engine.idle
    engine.check()
    engine.check_idle()


def test_a_deadline_ends_a_request() -> None:
    engine, _ = make_engine(sequences=1)
    engine.submit(make_submit(0, [1, 2], max_tokens=100, deadline_ms=500), now_s=10.0)
    engine.submit(make_submit(1, [1, 3], max_tokens=100, deadline_ms=300), now_s=10.0)
    heard = Heard()
    heard.hear(engine.step(10.2))
    heard.hear(engine.step(10.4))
    assert heard.finish == {1: "cancelled"}
    heard.hear(engine.step(10.6))
    assert heard.finish == {0: "cancelled", 1: "cancelled"}
    assert set(heard.freed) == {0, 1}
    assert heard.ids[0] == true_greedy([1, 2], 2)
    engine.check_idle()


def test_a_failed_forward_fails_its_batch_and_nobody_else() -> None:
    engine, model = make_engine(sequences=2)
    prompt = list(range(14))
    for request in range(4):
        engine.submit(make_submit(request, [*prompt, request]))
    heard = Heard()
    heard.hear(engine.step())
    model.fail_next = RuntimeError("out of memory")
    heard.hear(engine.step())
    assert set(heard.failed) == {0, 1}
    assert all(f.kind is FailureKind.ENGINE for f in heard.failed.values())
    engine.check()
    run(engine, heard)
    assert set(heard.freed) == {0, 1, 2, 3}
    for request in (2, 3):
        assert heard.ids[request] == true_greedy([*prompt, request], 8)
    engine.submit(make_submit(0, [*prompt, 0]))  # blocks of the failed step are not trusted
    assert run(engine).ids[0] == true_greedy([*prompt, 0], 8)


def a_panic() -> BaseException:
    """Of the Rust code: a row without any logit that a token could be drawn by."""
    one = np.ones(1)
    try:
        _core.race(
            np.full((1, 128), -np.inf, np.float32),
            np.arange(128, dtype=np.uint32),
            best=np.full(1, np.nan, np.float32),
            temperature=one,
            top_p=one / 2,
            min_p=one * 0,
            key=np.ones(1, np.uint32),
            key2=np.ones(1, np.uint32),
        )
    except BaseException as error:
        return error
    raise AssertionError("it drew a token")


def test_a_panic_in_a_kernel_fails_its_batch_and_nobody_else() -> None:
    panic = a_panic()
    assert not isinstance(panic, Exception)
    engine, model = make_engine(sequences=2)
    for request in range(3):
        engine.submit(make_submit(request, [1, 2, request]))
    heard = Heard()
    model.fail_next = panic
    heard.hear(engine.step())
    assert set(heard.failed) == {0, 1}
    assert all(f.kind is FailureKind.ENGINE for f in heard.failed.values())
    assert "KernelPanic: the most probable token is never cut" in heard.failed[0].message
    run(engine, heard)
    assert heard.ids[2] == true_greedy([1, 2, 2], 8)
    engine.check_idle()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_is_no_failure_of_a_batch(end: type[BaseException]) -> None:
    engine, model = make_engine()
    engine.submit(make_submit(0, [1, 2, 3]))
    model.fail_next = end()
    with pytest.raises(end):
        engine.step()


def test_logits_that_are_not_finite_fail_their_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = make_engine()
    forward = model.forward

    def broken(batch: object) -> torch.Tensor:
        logits = forward(batch)  # type: ignore[arg-type]
        logits[1, 3] = float("nan")
        return logits

    for request in range(3):
        engine.submit(make_submit(request, [request]))
    monkeypatch.setattr(model, "forward", broken)
    heard = Heard()
    heard.hear(engine.step())
    monkeypatch.setattr(model, "forward", forward)
    run(engine, heard)
    assert set(heard.failed) == {1}
    assert heard.ids[2] == true_greedy([2], 8)
    scoring = Sampling(prompt_logprobs=0)
    engine.submit(make_submit(3, [5, 6, 7], max_tokens=0, sampling=scoring))
    monkeypatch.setattr(model, "forward", broken)
    run(engine, heard)
    assert set(heard.failed) == {1, 3}
    engine.submit(make_submit(4, [5, 6, 7], max_tokens=2, sampling=scoring))
    run(engine, heard)
    assert set(heard.failed) == {1, 3, 4}
    assert 4 not in heard.ids

"""Split serving between two real workers; the test is their router."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headrace.wire.frames import (
    Cancel,
    Continue,
    Ranked,
    Sampling,
    Ticket,
)
from helpers.engine.toy import make_submit, pack
from helpers.worker.scene import BLOCK, true_greedy
from helpers.worker.split import PREFILL, Pair, pair

LONG = list(range(40))  # three steps of the workers


@pytest.fixture
async def two(tmp_path: Path) -> AsyncGenerator[Pair]:
    async with pair(tmp_path) as workers:
        yield workers


SEEDED = Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=11)
PENALISED = Sampling(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias=[Ranked(3, 2.0)],
    seed=5,
)


@pytest.mark.parametrize("length", [1, 3, BLOCK, BLOCK + 1, 3 * BLOCK, 16, 17, 40])
async def test_a_prompt_of_any_length_gives_the_answer_of_one_worker(
    two: Pair, length: int
) -> None:
    prompt = LONG[:length]
    answer = await two.whole(1, prompt, max_tokens=12)
    assert (answer.ids, answer.finish) == (true_greedy(prompt, 12), "length")
    assert two.pull_outcomes(1) == [None]
    (report,) = two.d.answer(1).transferred
    assert (report.worker, report.backend, report.blocks) == ("p", "shm", -(-length // BLOCK))
    assert report.bytes == report.blocks * two.prefill.model.kv_block_bytes
    two.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SEEDED},
        {"sampling": PENALISED},
        {"sampling": Sampling(logprobs=3)},
        {"sampling": Sampling(temperature=1.0, seed=2, logprobs=0)},
        {"stop_ids": list(range(0, 50, 7))},
        {"resumed": [5, 6, 7, 8, 9]},
        {"resumed": [5], "sampling": PENALISED},
    ],
    ids=[
        "seeded",
        "penalties",
        "logprobs",
        "seeded-logprobs",
        "stop",
        "resumed",
        "resumed-penalties",
    ],
)
async def test_a_split_answer_is_that_of_one_worker_token_for_token(
    two: Pair, fields: dict[str, Any]
) -> None:
    for number, prompt in enumerate((LONG[:9], LONG[:17], LONG), start=1):
        split = await two.whole(number, prompt, max_tokens=20, **fields)
        alone = await two.alone(100 + number, prompt, max_tokens=20, **fields)
        assert split.ids == alone.ids
        assert split.logprobs == alone.logprobs
        assert split.finish == alone.finish
    two.check()


async def test_only_blocks_that_are_missing_come(two: Pair) -> None:
    two.d.send(make_submit(1, LONG[:18], max_tokens=1))
    await two.d.until_freed(1)
    answer = await two.whole(2, LONG, max_tokens=6)
    assert answer.ids == true_greedy(LONG, 6)
    (report,) = two.d.answer(2).transferred
    assert (report.error, report.blocks) == (None, 10 - 18 // BLOCK)
    two.check()


async def test_a_prompt_that_is_here_already_lets_the_prefill_worker_go(two: Pair) -> None:
    await two.whole(1, LONG, max_tokens=3)
    answer = await two.whole(2, LONG, max_tokens=6)
    assert answer.ids == true_greedy(LONG, 6)
    assert sum(report.blocks for report in two.d.answer(2).transferred) <= 1
    two.check()


async def test_an_answer_may_end_with_the_prompt(two: Pair) -> None:
    one = await two.whole(1, LONG, max_tokens=1)
    assert (one.ids, one.finish) == (true_greedy(LONG, 1), "length")
    (token,) = one.ids
    stopped = await two.whole(2, LONG, max_tokens=9, stop_ids=[token])
    assert (stopped.ids, stopped.finish) == ([token], "stop")
    assert two.d.answer(1).ids == two.d.answer(2).ids == []
    two.check()


async def test_many_at_once(two: Pair) -> None:
    prompts = {number: LONG[number : number + 5 * number] for number in range(1, 8)}
    for number, prompt in prompts.items():
        two.submit(number, prompt, max_tokens=10)
    for number in prompts:
        await two.pass_on(number)
    for number in prompts:
        await two.go_on(number)
    for number, prompt in prompts.items():
        await two.freed(number)
        assert two.joined(number).ids == true_greedy(prompt, 10)
    two.check()


async def test_the_pull_begins_while_the_prompt_is_computed(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=4)
    gate.release(1)
    await two.pass_on(1)
    # 16 of 40 tokens are computed, and the first four blocks arrive
    assert two.decode.transfer is not None
    await two.p.until(lambda: two.p.steps[-1].step == 1)
    gate.release(100)
    assert await two.go_on(1)
    await two.freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 4)
    two.check()


# --- cancelled, at each stage ---


async def test_cancelled_before_the_ticket(two: Pair) -> None:
    two.submit(1, LONG)
    await two.ready(1)
    two.p.send(Cancel(PREFILL + 1))
    two.d.send(Cancel(1))
    await two.freed(1)
    assert two.d.answer(1).freed == 0
    two.check()


async def test_cancelled_during_the_pull(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG)
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    two.d.send(Cancel(1))
    await two.d.until_freed(1)
    assert two.d.answer(1).freed == 10
    assert two.pull_outcomes(1) == ["cancelled"]
    two.p.send(Cancel(PREFILL + 1))
    gate.release(100)
    await two.freed(1)
    two.check()


async def test_the_prefill_leg_cancelled_during_the_pull(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=5)
    gate.release(1)
    await two.pass_on(1)
    two.p.send(Cancel(PREFILL + 1))
    gate.release(100)
    await two.p.until_freed(PREFILL + 1)
    await two.d.until(lambda: bool(two.pull_outcomes(1)))
    assert two.pull_outcomes(1) == ["revoked"]
    two.d.send(Continue(1, b""))
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 5)
    two.check()


async def test_cancelled_between_pull_and_continue(two: Pair) -> None:
    two.submit(1, LONG)
    await two.pass_on(1)
    await two.d.until(lambda: bool(two.pull_outcomes(1)))
    two.d.send(Cancel(1))
    two.p.send(Cancel(PREFILL + 1))
    await two.freed(1)
    assert two.d.answer(1).freed == 10
    assert two.d.answer(1).ids == []
    two.check()


async def test_cancelled_while_it_decodes(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=100)
    await two.pass_on(1)
    assert await two.go_on(1)
    await two.d.until(lambda: len(two.d.answer(1).ids) >= 2)
    two.d.send(Cancel(1))
    await two.freed(1)
    assert (two.d.answer(1).freed or 0) >= 10
    two.check()


async def test_ticket_and_continue_that_cross_a_cancel_are_ignored(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=4)
    ready = await two.ready(1)
    two.d.send(Cancel(1), Ticket(1, ready.ticket), Continue(1, pack([1])))
    two.p.send(Cancel(PREFILL + 1))
    await two.freed(1)
    answer = await two.whole(2, LONG, max_tokens=4)
    assert answer.ids == true_greedy(LONG, 4)
    two.check()

"""The worker loop against routers on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from headrace import _core
from headrace.errors import Refused
from headrace.wire.frames import (
    Bye,
    Cancel,
    Describe,
    Drain,
    FailureKind,
    ModelPart,
    Ping,
    RefuseReason,
    Resync,
    Sampling,
    Snapshot,
    Step,
)
from helpers.engine.toy import make_submit, pack
from helpers.worker.fake_router import FakeRouter, keys
from helpers.worker.frames import refusal
from helpers.worker.scene import BLOCK, joined, running, stepped, true_greedy


async def test_hello_snapshot_then_a_streamed_answer(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        assert router.hello is not None
        assert router.hello.capacity.blocks == 64
        assert isinstance(await talk.until_frame(Step), Step)
        talk.send(make_submit(1, [1, 2, 3], max_tokens=9))
        await talk.until_freed(1)
        answer = talk.answer(1)
        assert (answer.ids, answer.finish) == (true_greedy([1, 2, 3], 9), "length")
        assert (answer.cached_tokens, answer.freed) == (0, 3)
        numbers = [step.step for step in talk.steps if step.outputs]
        assert len(numbers) == 9
        assert numbers == sorted(set(numbers)), "one Step frame for each step"
        scene.check()


async def test_the_router_knows_what_the_cache_holds(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        prompt = list(range(17))
        talk.send(make_submit(1, prompt, max_tokens=1))
        await talk.until_freed(1)
        hashes = _core.hash_blocks(pack(prompt), BLOCK, bytes(32))
        assert talk.cache == keys(b"".join(h[:8] for h in hashes))
        talk.send(make_submit(2, prompt, max_tokens=30))
        await talk.until_freed(2)
        assert talk.answer(2).cached_tokens == 16
        for request in range(3, 9):  # more than the pool holds
            talk.send(make_submit(request, [request] * 40, max_tokens=20))
        await talk.until_freed(*range(3, 9))
        held = {name[:8] for name in scene.engine.pool.names()}
        assert talk.cache == keys(b"".join(held))
        scene.check()


async def test_cancel_at_every_stage_frees_and_says_so(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router, sequences=2) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1] * 5, max_tokens=200))
        talk.send(make_submit(2, [2] * 60, max_tokens=200))
        talk.send(make_submit(3, [3] * 5, max_tokens=200))
        gate.release(3)
        await talk.until(lambda: len(talk.answer(1).ids) >= 2)
        # 1 decodes, 2 is in its prompt, 3 waits for a batch row, 4 is unknown; a step holds the engine.
        beats = len(talk.steps)
        talk.send(Cancel(4), Cancel(3), Cancel(2), Cancel(1), Ping(0))
        await talk.until(lambda: len(talk.steps) > beats)  # the worker has read them
        gate.release(1)
        await talk.until_freed(1, 2, 3, 4)
        assert talk.answer(3).freed == talk.answer(4).freed == 0
        assert (talk.answer(2).freed or 0) >= 15
        assert (talk.answer(1).freed or 0) >= 2
        for request in (1, 2, 3):
            assert talk.answer(request).finish is None
        assert talk.steps[-1].load.blocks_used == talk.steps[-1].load.running == 0
        scene.check()


async def test_a_finished_request_that_is_cancelled_is_freed_once_more(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router):
        talk = await joined(router)
        talk.send(make_submit(1, [1], max_tokens=1))
        await talk.until_freed(1)
        talk.answer(1).freed = None
        talk.send(Cancel(1))
        await talk.until_freed(1)
        assert talk.answer(1).freed == 0


async def test_bad_requests_fail_by_name(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1, 2], max_tokens=5), make_submit(1, [3]))
        talk.send(make_submit(2, [99]), make_submit(3, [1] * 300))
        gate.release(1000)
        await talk.until_freed(1)
        await talk.until(lambda: talk.answer(3).failed is not None)
        failed = {r: answer.failed for r, answer in talk.answers.items()}
        assert {r: f.kind for r, f in failed.items() if f} == {
            1: "duplicate_request",
            2: "bad_token",
            3: "too_long",
        }
        assert talk.answer(1).ids == true_greedy([1, 2], 5)  # the first one went on


async def test_heartbeats_come_while_idle_and_during_a_long_step(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "r", heartbeat_ms=20) as router,
        running(router) as scene,
    ):
        talk = await joined(router)
        await talk.until(lambda: len(talk.steps) >= 4)
        assert {step.step for step in talk.steps} == {0}
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1], max_tokens=2))
        gate.release(1)
        await talk.until(lambda: bool(talk.answer(1).ids))
        beats = len(talk.steps)
        await talk.until(lambda: len(talk.steps) >= beats + 3)  # the second step hangs
        assert talk.steps[-1].step == 1
        gate.release(1)
        await talk.until_freed(1)


async def test_ping_is_answered_with_a_step(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router):
        talk = await joined(router)
        await talk.until_frame(Step)
        seen = len(talk.steps)
        talk.send(Ping(5))
        await talk.until(lambda: len(talk.steps) > seen)


async def test_the_blocks_of_a_step_come_before_it(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        prompt = list(range(40))  # three steps of at most 16 tokens
        known: list[
            tuple[int, int]
        ] = []  # (prompt tokens computed so far, blocks known) at each step
        talk.send(make_submit(1, prompt, max_tokens=1))
        computed = 0
        while talk.answer(1).finish is None:
            step = await talk.until_frame(Step)
            if step.step > len(known):  # no heartbeat
                computed += step.prefill_tokens
                known.append((computed, len(talk.cache)))
        assert known == [(16, 4), (32, 8), (40, 10)]
        await talk.until_freed(1)
        scene.check()


async def test_the_time_of_a_step_is_all_that_a_request_waits_for(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r", heartbeat_ms=20) as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        steps = 0
        for request in (1, 2):
            scene.model.spans_s.clear()
            times_ms: list[float] = []
            sent_s = time.monotonic()
            talk.send(make_submit(request, [request] * 40, max_tokens=3))
            for _ in range(5):
                gate.release()
                steps += 1
                await stepped(talk, steps)
                times_ms.append(talk.steps[-1].ms)
            await talk.until_freed(request)
            heard_s = time.monotonic()
            (first_s, _), (_, last_s) = scene.model.spans_s[0], scene.model.spans_s[-1]
            # nothing between the steps is left out, and the idle time before them is not in it
            assert (last_s - first_s) * 1e3 <= sum(times_ms) <= (heard_s - sent_s) * 1e3
            beats = len(talk.steps)
            await talk.until(lambda beats=beats: len(talk.steps) > beats + 3)
        scene.check()


async def test_what_waits_is_told_without_a_step_too(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router, sequences=1) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1] * 40, max_tokens=3), make_submit(2, [2] * 40))
        gate.release()
        await stepped(talk, 1)
        assert talk.steps[-1].waiting_tokens in {24, 24 + 40}  # 2 may have come after its start
        beats = len(talk.steps)
        talk.send(Cancel(1), Cancel(2), Ping(0))
        await talk.until(lambda: len(talk.steps) > beats)  # the worker has read them
        gate.release()
        await talk.until_freed(1, 2)
        assert talk.steps[-1].waiting_tokens == 0
        scene.check()


async def test_resync_is_answered_with_a_snapshot_even_inside_a_step(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as first,
        FakeRouter(tmp_path / "b", name="b") as second,
        running(first, second) as scene,
    ):
        lost, other = await joined(first), await joined(second)
        lost.send(make_submit(1, list(range(17)), max_tokens=1))
        await asyncio.gather(lost.until_freed(1), other.until(lambda: len(other.cache) == 4))
        gate = scene.model.gate = threading.Semaphore(0)
        lost.send(make_submit(2, [7] * 9, max_tokens=1))
        before = lost.sequence
        assert before is not None
        lost.cache.clear()
        lost.send(Resync("block events 9 after 7"), Resync("again, before the answer came"))
        snapshot = await lost.until_frame(Snapshot)  # the step has not ended
        assert (snapshot.epoch, snapshot.sequence, snapshot.last) == (7, before + 1, True)
        assert lost.cache == other.cache != set()
        gate.release(100)
        await asyncio.gather(lost.until_freed(2), other.until(lambda: len(other.cache) == 6))
        assert lost.cache == other.cache
        assert not any(isinstance(f, Snapshot) and f.sequence for f in other.seen)
        scene.check()


async def test_a_resync_right_after_the_welcome_changes_nothing(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await router.worker()
        talk.send(Resync("out of place"), make_submit(1, list(range(9)), max_tokens=1))
        await talk.until_freed(1)
        assert len(talk.cache) == 2
        scene.check()


async def test_describe_sends_the_document_in_parts(tmp_path: Path) -> None:
    document = json.dumps({"text": "x" * (5 << 19)}).encode()
    async with (
        FakeRouter(tmp_path / "r") as router,
        running(router, document=document),
    ):
        talk = await joined(router)
        talk.send(Describe("t/c"))
        parts: list[ModelPart] = []
        while not parts or not parts[-1].last:
            parts.append(await talk.until_frame(ModelPart))
        assert [part.part for part in parts] == [0, 1, 2]
        assert all(part.fingerprint == "t/c" and len(part.data) <= 1 << 20 for part in parts)
        assert b"".join(part.data for part in parts) == document


async def test_another_model_cannot_be_described(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router):
        talk = await joined(router)
        talk.send(Describe("t/another"))
        await talk.until_closed()
        assert not any(isinstance(frame, ModelPart) for frame in talk.seen)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 100, b"\x02\x00\x00\x00\x91\x63", b"\x00\x00\x00\x00"]
)
async def test_garbage_ends_the_link_and_the_worker_dials_again(
    tmp_path: Path, garbage: bytes
) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        talk.send(make_submit(1, [1], max_tokens=200))
        await talk.until(lambda: bool(talk.answer(1).ids))
        talk.send_garbage(garbage)
        await talk.until_closed()
        again = await joined(router)
        again.send(make_submit(1, [1, 2], max_tokens=3))
        await again.until_freed(1)
        assert again.answer(1).ids == true_greedy([1, 2], 3)
        assert again.steps[-1].load.running == 0
        scene.check()


async def test_a_router_that_ends_is_told_and_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeRouter(tmp_path / "r") as router, running(router):
        talk = await joined(router)
        talk.hang_up()
        await joined(router)
    [told] = [one for one in caplog.records if "the router closed the link" in one.getMessage()]
    assert told.levelname == "INFO"


async def test_requests_of_a_lost_router_are_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        for request in range(6):
            talk.send(make_submit(request, [request] * 9, max_tokens=200))
        gate.release(3)
        await talk.until(lambda: bool(talk.answer(0).ids))
        talk.hang_up()
        again = await router.worker()
        gate.release(1)
        await again.until(lambda: bool(again.steps) and again.steps[-1].load.running == 0)
        await again.until(lambda: again.sequence is not None)
        held = {name[:8] for name in scene.engine.pool.names()}
        assert again.cache == keys(b"".join(held)) != set()
        assert again.answers == {}
        assert "left with 6 requests" in caplog.text, (
            "a warning: the router did not end in good order"
        )
        scene.check()


async def test_two_routers_may_use_the_same_numbers(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as first,
        FakeRouter(tmp_path / "b", name="b") as second,
        running(first, second) as scene,
    ):
        one, two = await joined(first), await joined(second)
        one.send(make_submit(1, [1, 2, 3], max_tokens=30))
        two.send(make_submit(1, [4, 5], max_tokens=30))
        await asyncio.gather(one.until_freed(1), two.until_freed(1))
        assert one.answer(1).ids == true_greedy([1, 2, 3], 30)
        assert two.answer(1).ids == true_greedy([4, 5], 30)
        assert one.cache == two.cache != set()
        one.send(make_submit(2, [1], max_tokens=200))
        two.send(make_submit(2, [2], max_tokens=40))
        await one.until(lambda: bool(one.answer(2).ids))
        one.hang_up()
        await two.until_freed(2)
        assert two.answer(2).ids == true_greedy([2], 40)
        await two.until(lambda: two.steps[-1].load.running == 0)
        scene.check()


async def test_what_one_router_sends_the_others_hear_of_while_a_step_runs(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as first,
        FakeRouter(tmp_path / "b", name="b") as second,
        running(first, second) as scene,
    ):
        one, two = await joined(first), await joined(second)
        gate = scene.model.gate = threading.Semaphore(0)
        for request in (1, 2):  # neither step nor heartbeat is due
            one.send(make_submit(request, [request] * 5, max_tokens=3))
            await two.until(
                lambda request=request: (
                    bool(two.steps)
                    and two.steps[-1].load.running + two.steps[-1].load.waiting == request
                )
            )
        assert two.steps[-1].waiting_tokens == 10
        gate.release(100)
        await one.until_freed(1, 2)
        scene.check()


async def test_a_router_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as first,
        FakeRouter(tmp_path / "b", name="b") as second,
        running(first, second) as scene,
    ):
        slow, fast = await joined(first), await joined(second)
        wanted = Sampling(logprobs=40)
        slow.send(*(make_submit(r, [r], max_tokens=200, sampling=wanted) for r in range(4)))
        for request in range(20):
            fast.send(make_submit(request, [request, 9], max_tokens=5))
        await fast.until_freed(*range(20))
        await slow.until_freed(*range(4))  # all of it is there once it reads
        for request in range(4):
            assert slow.answer(request).ids == true_greedy([request], 200)
        scene.check()


async def test_another_hash_key_clears_the_cache(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        talk.send(make_submit(1, list(range(17)), max_tokens=1))
        await talk.until_freed(1)
        assert talk.cache
        talk.hang_up()
        same = await joined(router)
        assert same.cache == talk.cache
        same.hang_up()
        other = await joined(router, hash_key=b"k" * 32)
        assert other.cache == set()
        other.send(make_submit(1, list(range(17)), max_tokens=1))
        await other.until_freed(1)
        assert other.answer(1).cached_tokens == 0
        hashes = _core.hash_blocks(pack(list(range(17))), BLOCK, b"k" * 32)
        assert other.cache == keys(b"".join(h[:8] for h in hashes))
        scene.check()


async def test_drain_finishes_what_runs_and_leaves(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1, 2], max_tokens=6))
        gate.release(2)
        await talk.until(lambda: bool(talk.answer(1).ids))
        talk.send(Drain(60_000), make_submit(2, [3]))
        gate.release(100)
        await talk.until_closed()
        assert any(isinstance(frame, Bye) for frame in talk.seen)
        assert (talk.answer(1).ids, talk.answer(1).freed) == (true_greedy([1, 2], 6), 2)
        failed = talk.answer(2).failed
        assert failed is not None
        assert failed.kind is FailureKind.DRAINING
        await scene.ended()
        scene.check()


async def test_a_drain_without_time_hands_requests_back(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "r") as router,
        FakeRouter(tmp_path / "absent", name="never answers"),
        running(router) as scene,
    ):
        talk = await joined(router)
        talk.send(make_submit(1, [1, 2], max_tokens=200), Drain(0))
        await talk.until_closed()
        failed = talk.answer(1).failed
        assert failed is not None
        assert failed.kind is FailureKind.DRAINING
        assert talk.answer(1).freed is not None
        await scene.ended()
        scene.check()


async def test_a_worker_without_a_router_can_be_drained(tmp_path: Path) -> None:
    nowhere = FakeRouter(tmp_path / "nobody")
    async with running(nowhere) as scene:
        scene.worker.drain(60.0, "a signal")
        await scene.ended()


async def test_a_worker_that_is_refused_ends(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        talk.send(refusal(RefuseReason.SUPERSEDED))
        with pytest.raises(BaseExceptionGroup) as caught:
            await scene.ended()
        assert caught.group_contains(Refused)


async def test_a_router_that_refuses_leaves_the_worker_to_the_others(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as first,
        FakeRouter(tmp_path / "b", name="b") as second,
        running(first, second) as scene,
    ):
        refusing, other = await joined(first), await joined(second)
        gate = scene.model.gate = threading.Semaphore(0)
        refusing.send(make_submit(1, [1], max_tokens=200))
        other.send(make_submit(1, [1, 2], max_tokens=9))
        gate.release(2)
        await refusing.until(lambda: bool(refusing.answer(1).ids))
        refusing.send(refusal(RefuseReason.SUPERSEDED))
        await refusing.until_closed()
        gate.release(1000)
        await other.until_freed(1)
        assert other.answer(1).ids == true_greedy([1, 2], 9)
        await other.until(lambda: other.steps[-1].load.running == 0)
        other.send(Ping(1), refusal(RefuseReason.SUPERSEDED))
        with pytest.raises(BaseExceptionGroup) as caught:
            await scene.ended()
        assert caught.group_contains(Refused)
        scene.check()


async def test_idle_means_blocked(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        talk.send(make_submit(1, [1], max_tokens=2))
        await talk.until_freed(1)
        steps = scene.engine.steps.finished
        for nonce in range(5):  # round trips through a live event loop
            seen = len(talk.steps)
            talk.send(Ping(nonce))
            await talk.until(lambda seen=seen: len(talk.steps) > seen)
        assert scene.engine.steps.finished == steps == scene.model.forwards

"""The worker loop while a step runs: the next one is planned, and what comes is taken in at once."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace.wire.frames import Cancel, Drain
from helpers.engine.toy import make_submit
from helpers.worker.fake_router import FakeRouter
from helpers.worker.scene import Scene, joined, running, true_greedy


async def test_the_next_step_is_planned_while_one_runs(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        most = watch(scene)
        talk.send(make_submit(1, [1, 2, 3], max_tokens=40))
        await talk.until_freed(1)
        assert talk.answer(1).ids == true_greedy([1, 2, 3], 40)
        assert max(most) == 2
        scene.check()


async def test_without_overlap_one_step_is_in_flight_at_most(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router, overlap=False) as scene:
        talk = await joined(router)
        most = watch(scene)
        talk.send(make_submit(1, [1, 2, 3], max_tokens=40))
        await talk.until_freed(1)
        assert talk.answer(1).ids == true_greedy([1, 2, 3], 40)
        assert max(most) == 1


async def test_a_cancel_frees_its_blocks_while_the_step_still_runs(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1] * 30, max_tokens=9), make_submit(2, [2] * 5, max_tokens=4))
        await scene.computing()
        talk.send(Cancel(1))
        await talk.until_freed(1)  # the step has not ended
        gate.release(1000)
        await talk.until_freed(2)
        assert talk.answer(1).ids == []
        assert talk.answer(2).ids == true_greedy([2] * 5, 4)
        scene.check()


async def test_a_request_is_refused_while_a_step_runs(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1] * 9, max_tokens=9))
        await scene.computing()
        talk.send(make_submit(2, [99]))
        await talk.until(lambda: talk.answer(2).failed is not None)
        gate.release(1000)
        await talk.until_freed(1)
        assert talk.answer(1).ids == true_greedy([1] * 9, 9)


async def test_a_worker_out_of_time_leaves_with_steps_in_flight(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        gate = scene.model.gate = threading.Semaphore(0)
        talk.send(make_submit(1, [1] * 9, max_tokens=90))
        await scene.computing()
        talk.send(Drain(budget_ms=0))
        await talk.until(lambda: talk.answer(1).failed is not None)
        gate.release(1000)
        await scene.ended()
        assert len(scene.engine.steps) == 0
        scene.check()


def watch(scene: Scene) -> list[int]:
    """How many steps are in flight, at each beginning of one."""
    seen: list[int] = []
    begin = scene.engine.steps.begin

    def watched() -> object:
        step = begin()
        seen.append(len(scene.engine.steps))
        return step

    scene.engine.steps.begin = watched  # type: ignore[method-assign, assignment]
    return seen

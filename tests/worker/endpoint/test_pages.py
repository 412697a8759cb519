"""What the endpoint of a worker says while its model is loaded, while it serves and when it leaves."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from typing import cast

import pytest

from headrace.worker.endpoint import watched as watched_module
from headrace.worker.endpoint.pages import PATHS
from headrace.worker.endpoint.watched import WatchedWorker, WorkerReport
from helpers.tools import prometheus_tool
from helpers.worker.watched import REPORT, endpoint, request, serving_endpoint


async def test_a_worker_lives_from_the_loading_of_its_model_on_and_is_ready_once_a_router_took_it() -> (
    None
):
    with endpoint() as scene:
        assert (await scene.get("/livez")).json == {"status": "ok"}
        loading = await scene.get("/readyz")
        assert (loading.status, loading.json["status"]) == (503, "loading")
        scene.change(joined=0)
        with scene.watched.serving(scene.now):
            joining = await scene.get("/readyz")
            assert (joining.status, joining.json["status"]) == (503, "joining")
            scene.change(joined=2)
            ready = await scene.get("/readyz")
            assert (ready.status, ready.json) == (200, {"status": "ready"})
            scene.change(draining=True)
            draining = await scene.get("/readyz")
            assert (draining.status, draining.json["status"]) == (503, "draining")
            assert (await scene.get("/livez")).status == 200
        assert (await scene.get("/readyz")).json["status"] == "loading"


async def test_head_has_the_status_alone() -> None:
    async with serving_endpoint() as scene:
        answer = await scene.get("/readyz", method="HEAD")
    assert (answer.status, answer.body) == (200, "")


async def test_answers_are_kept_by_nobody_and_end_their_connection() -> None:
    async with serving_endpoint() as scene:
        answer = await scene.get("/livez")
        assert (answer.headers["cache-control"], answer.headers["server"]) == (
            "no-store",
            "headrace",
        )
        twice = await scene.raw(request("/livez") * 2)
    assert twice.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("path", ["/", "/health", "/livez/", "/debug", "/debug/pprof", "/%2e%2e/x"])
async def test_other_paths_are_told_which_there_are(path: str) -> None:
    async with serving_endpoint() as scene:
        answer = await scene.get(path)
    assert answer.status == 404
    assert all(known in answer.json["message"] for known in PATHS)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
async def test_other_methods_are_refused(method: str) -> None:
    async with serving_endpoint() as scene:
        answer = await scene.get("/livez", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def samples(page: str) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def promtool_says(page: str) -> str:
    command = [prometheus_tool("promtool"), "check", "metrics"]
    return subprocess.run(command, input=page, capture_output=True, text=True).stderr


async def test_metrics_are_what_the_worker_says_and_promtool_reads_them() -> None:
    totals = REPORT.totals.copy()
    totals.steps.observe(0.0005)
    totals.steps.observe(0.003)
    totals.steps.observe(1000.0)
    totals.output_tokens = 2**60
    totals.ended["stop"] = 7
    async with serving_endpoint() as scene:
        scene.change(totals=totals, model='a "model"\nof\\mine')
        answer = await scene.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.body)
    for name, value in {
        "headrace_engine_ready": 1,
        "headrace_engine_routers": 1,
        "headrace_engine_running": 3,
        "headrace_engine_waiting": 2,
        "headrace_engine_blocks": 100,
        "headrace_engine_blocks_used": 25,
        "headrace_engine_preemptions_total": 4,
        "headrace_engine_output_tokens_total": 2**60,
        'headrace_engine_requests_total{outcome="stop"}': 7,
        'headrace_engine_step_seconds_bucket{le="0.0005"}': 1,
        'headrace_engine_step_seconds_bucket{le="0.005"}': 2,
        'headrace_engine_step_seconds_bucket{le="640"}': 2,
        'headrace_engine_step_seconds_bucket{le="+Inf"}': 3,
        "headrace_engine_step_seconds_count": 3,
    }.items():
        assert found[name] == value, name
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert r'model="a \"model\"\nof\\mine"' in answer.body
    assert promtool_says(answer.body) == ""


async def test_before_it_serves_metrics_say_that_and_what_the_process_takes() -> None:
    with endpoint() as scene:
        found = samples((await scene.get("/metrics")).body)
    assert found["headrace_engine_ready"] == 0
    assert "headrace_engine_running" not in found
    assert found["process_open_fds"] > 3


class HungLoop:
    """It takes calls, and makes none of them."""

    def __init__(self) -> None:
        self.calls = 0

    def call_soon_threadsafe(self, _: object) -> None:
        self.calls += 1


async def test_a_worker_that_stands_still_is_dead_and_can_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_module, "ANSWER_S", 0.05)
    hung = HungLoop()
    with endpoint() as scene:
        scene.watched._serving = cast("asyncio.AbstractEventLoop", hung), scene.now
        asked = await asyncio.gather(
            *(scene.get(path) for path in ("/livez", "/readyz", "/metrics") for _ in range(5))
        )
        for answer in asked:
            assert (answer.status, answer.json["status"]) == (503, "stands still")
        assert hung.calls == 1, "one question, however many ask"
        assert (await scene.get("/debug/stack")).status == 200


async def test_stacks_show_every_thread_and_every_task() -> None:
    release = threading.Event()

    def stuck_in_here() -> None:
        release.wait()

    async def waits_in_here() -> None:
        await asyncio.Event().wait()

    thread = threading.Thread(target=stuck_in_here, name="a stuck thread")
    thread.start()
    task = asyncio.create_task(waits_in_here(), name="a waiting task")
    try:
        async with serving_endpoint() as scene:
            await asyncio.sleep(0)
            text = (await scene.get("/debug/stack")).body
    finally:
        release.set()
        thread.join()
        task.cancel()
    of_thread = re.search(
        r"^thread a stuck thread \(\d+\)\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE
    )
    of_task = re.search(r"^task a waiting task\n(.*?)\n\n", text + "\n\n", re.DOTALL | re.MULTILINE)
    assert of_thread is not None and "stuck_in_here" in of_thread[1]
    assert of_task is not None and "waits_in_here" in of_task[1]


async def test_a_report_that_fails_is_an_answer_and_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> WorkerReport:
        raise RuntimeError("no report")

    with endpoint() as scene, scene.watched.serving(broken):
        answer = await scene.get("/metrics")
    assert (answer.status, answer.json["message"]) == (
        500,
        "the log of the worker says what went wrong",
    )
    assert "no report" in caplog.text


async def test_a_loop_that_is_closed_serves_no_more() -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    watched = WatchedWorker()
    watched._serving = closed, lambda: REPORT
    assert await watched.report() is None

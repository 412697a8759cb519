"""Where the endpoint listens, what stands against it, and what it shows of a worker that serves a router."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sequence import Key
from headrace.errors import CannotRun, MissingExtra
from headrace.settings.worker import WorkerSettings
from headrace.wire.frames import Output
from headrace.wire.output_columns import Outputs
from headrace.worker import main
from headrace.worker.endpoint.start import listen, port_of, watching
from headrace.worker.endpoint.totals import EngineTotals
from headrace.worker.parallel.environment import read_environment
from helpers.engine.toy import make_submit
from helpers.models.tiny_model import tiny_llama
from helpers.worker.fake_router import FakeRouter
from helpers.worker.scene import joined, running
from helpers.worker.watched import HttpPort

SETTINGS = WorkerSettings(http_port=0)


def url(caplog: pytest.LogCaptureFixture) -> str:
    """As the log has it."""
    [found] = re.findall(r"HTTP for probes and metrics at (http://\S+)", caplog.text)
    return found


async def test_a_worker_is_watched_while_it_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with watching(SETTINGS, None) as watched:
        scene = HttpPort(int(url(caplog).rpartition(":")[2]))
        async with (
            FakeRouter(tmp_path / "r") as router,
            running(router) as worker,
        ):
            with watched.serving(worker.worker.report):
                talk = await joined(router)
                talk.send(make_submit(1, [1, 2, 3, 4, 5], max_tokens=6))
                await talk.until(lambda: talk.answer(1).finish is not None)
                assert (await scene.get("/readyz")).status == 200
                page = (await scene.get("/metrics")).body
                assert "task links" in (await scene.get("/debug/stack")).body
                worker.worker.drain(0.0, "the test is over")
                assert (await scene.get("/readyz")).json["status"] == "draining"
        lines = page.splitlines()
    for line in (
        "headrace_engine_routers 1",
        "headrace_engine_prompt_tokens_total 5",
        "headrace_engine_output_tokens_total 6",
        'headrace_engine_requests_total{outcome="length"} 1',
        "headrace_engine_step_seconds_count 6",
    ):
        assert line in lines, page
    with pytest.raises(ConnectionRefusedError):
        await scene.get("/livez")  # it has ended


def test_totals_are_of_steps_that_are_new_and_of_all_that_links_get() -> None:
    totals = EngineTotals()
    result = StepResult(step=1, ms=3.0, prefill_tokens=9, drafted=4, accepted=2)
    result.of(0).said.append(Output(1, [7]))
    result.of(1).columns = Outputs.of([Output(5, [1]), Output(6, [2, 3])])
    result.ended.append(
        EndedSequence(key=Key(0, 1), prompt_tokens=9, cached_tokens=4, output_tokens=1)
    )
    totals.stepped(result)
    said_between = StepResult(step=1, ms=0.0)
    said_between.of(0).said.append(Output(2, [8]))
    totals.stepped(said_between)
    copy = totals.copy()
    totals.stepped(StepResult(step=2, ms=1.0))
    assert (copy.steps.sum_s, sum(copy.steps.counts), sum(totals.steps.counts)) == (0.003, 1, 2)
    assert (copy.prompt_tokens, copy.cached_tokens, copy.output_tokens) == (9, 4, 5)
    assert (copy.drafted_tokens, copy.accepted_tokens) == (4, 2)


def test_without_the_flag_nothing_listens_and_nothing_is_imported() -> None:
    program = (
        "import sys\n"
        "from headrace.settings.worker import WorkerSettings\n"
        "from headrace.worker.main import watching\n"
        "with watching(WorkerSettings(), None): pass\n"
        "assert 'aiohttp' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_aiohttp_the_flag_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "headrace.worker.endpoint.server", raising=False)
    with pytest.raises(MissingExtra) as refused, watching(SETTINGS, None):
        pass
    assert str(refused.value) == (
        "--http-port: aiohttp is not installed; run: pip install 'headrace[cpu]'"
    )


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotRun) as refused:
            main.run(replace(SETTINGS, http_port=port, model="/no/such/model"))
    assert str(refused.value) == (
        f"--http-port {port} cannot be had on 127.0.0.1: Address already in use; give another --http-port (0 is any "
        "that is free) or another --http-host"
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 300, "a\0b", ""])
def test_hosts_that_are_not_here_are_refused_in_words(host: str) -> None:
    with pytest.raises(CannotRun, match="--http-port 0 cannot be had on"):
        listen(host, 0).close()


def test_ipv6_is_an_address_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with watching(replace(SETTINGS, http_host="::1"), None):
        assert url(caplog).startswith("http://[::1]:")


def rank(local: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": "8",
        "RANK": str(local),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }


def test_each_rank_of_a_machine_has_the_next_port() -> None:
    ports = [port_of(8002, read_environment(rank(local))) for local in range(3)]
    assert ports == [8002, 8003, 8004]
    assert port_of(0, read_environment(rank(3))) == 0
    assert port_of(8002, None) == 8002
    with pytest.raises(CannotRun, match="leaves no port for every rank"):
        port_of(65_530, read_environment(rank(7)))


async def test_a_process_shows_itself_from_its_start_to_its_end(tmp_path: Path) -> None:
    """The whole program, whose router never comes."""
    command = [sys.executable, "-m", "headrace", "worker", str(tiny_llama(tmp_path / "tiny"))]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--router", f"unix:{tmp_path}/none", "--http-port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        while (line := (await process.stderr.readline()).decode()) != "":
            if (found := re.search(r"http://127.0.0.1:(\d+)", line)) is not None:
                break
        else:
            raise AssertionError("it ended")
        scene = HttpPort(int(found[1]))
        states: list[str] = []
        while "joining" not in states:
            states.append((await scene.get("/readyz")).json["status"])
            assert (await scene.get("/livez")).status == 200
        assert set(states) <= {"loading", "joining"}
        assert "thread MainThread" in (await scene.get("/debug/stack")).body
        assert "MainThread;" in (await scene.get("/debug/profile?seconds=1")).body
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""Signals: the first drains, the second stops; nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from helpers.serving.server import START_S, Running, Server, eventually, serving


def stream_body(server: Server, tokens: int) -> dict[str, object]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    "flags", [("--workers=1",), ("--workers=2",), ("--prefill=1", "--decode=1")], ids=" ".join
)
def test_a_clean_stop_warns_of_nothing(tiny_folder: Path, flags: tuple[str, ...]) -> None:
    with serving(str(tiny_folder), *flags) as server:
        workers = len(server.workers())
        with server.stream("/v1/chat/completions", stream_body(server, 400)) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            assert list(events)[-1] == "[DONE]", "answers end before workers and router go"
        assert server.wait() == 0
        stopping = next(n for n, line in enumerate(server.lines) if "stopping: running" in line)
        after = server.lines[stopping:]
        assert sum("left in good order" in line for line in after) == workers
        assert not [line for line in after if "WARN" in line or "ERROR" in line]


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_streams_finish(tiny_folder: Path, number: signal.Signals) -> None:
    # Long, as others use the machine.
    with serving(str(tiny_folder), "--drain-timeout-ms", "280000") as server:
        children = server.children()
        with server.stream("/v1/chat/completions", stream_body(server, 4_000)) as events:
            next(events)
            with server.frozen("worker-0"):  # so that the answer is still in flight
                server.process.send_signal(number)
                server.wait_line("stopping: running answers may finish", timeout=60)
                eventually(lambda: _refused(server), lambda: "new connections are still taken")
            rest = list(events)
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not psutil.wait_procs(children, timeout=60)[1]


def test_the_second_signal_stops_at_once(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), "--drain-timeout-ms", "600000") as server:
        children = server.children()
        with (
            server.stream("/v1/chat/completions", stream_body(server, 4_000)) as events,
            server.frozen("worker-0"),  # so that the answer cannot finish
        ):
            next(events)
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("stopping: running answers may finish", timeout=60)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
        assert not psutil.wait_procs(children, timeout=60)[1]


def test_an_answer_past_the_drain_deadline_is_cut_with_an_error(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), "--drain-timeout-ms", "500") as server:
        with (
            server.stream("/v1/chat/completions", stream_body(server, 4_000)) as events,
            server.frozen("worker-0"),
        ):
            server.process.send_signal(signal.SIGTERM)
            rest = list(events)
        assert "[DONE]" not in rest
        assert json.loads(rest[-1])["error"]["code"] == "shutting_down"
        assert server.wait(60) == 0


@contextlib.contextmanager
def lone_worker(folder: Path, listen: str, stderr: int = subprocess.STDOUT) -> Generator[Running]:
    """A worker that nobody supervises."""
    worker = Running("worker", str(folder), "--router", listen, "--name", "lone", stderr=stderr)
    try:
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def lone_router(listen: str) -> Generator[Server]:
    server = Server("router", "--port", "0", "--worker-listen", listen)
    try:
        server.set_url(server.wait_line(r"(http://127\.0\.0\.1:\d+) for clients", timeout=60)[1])
        yield server
    finally:
        server.close()


def test_a_worker_serves_and_ends_though_nobody_reads_its_log(
    tiny_folder: Path, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path / 'r'}"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    try:
        with lone_router(listen) as server, lone_worker(tiny_folder, listen, writing) as worker:
            eventually(lambda: server.get("/ready").status == 200, server.tail, START_S)
            assert server.post("/v1/chat/completions", stream_body(server, 5)).status == 200
            worker.process.send_signal(signal.SIGTERM)
            assert worker.wait() == 0
    finally:
        os.close(writing)
        os.close(reading)


def test_the_second_signal_ends_a_worker_whose_router_takes_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path / 'r'}"
    with lone_router(listen) as server, lone_worker(tiny_folder, listen) as worker:
        eventually(lambda: server.get("/ready").status == 200, server.tail, START_S)
        with server.stream("/v1/chat/completions", stream_body(server, 8_000)) as events:
            next(events)
            with server.stopped():
                worker.process.send_signal(signal.SIGTERM)
                worker.wait_line("draining for at most", timeout=60)
                worker.process.send_signal(signal.SIGTERM)
                assert worker.wait() in {0, 128 + signal.SIGTERM}


def test_nothing_outlives_a_server_that_is_killed(tiny_folder: Path) -> None:
    with serving(str(tiny_folder)) as server:
        children = server.children()
        assert len(children) >= 2
        server.process.kill()
        assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_model_that_cannot_be_served_ends_it_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt17"}')
    server = Running("serve", str(tmp_path), "--port", "0")
    try:
        assert server.wait(120) != 0
        assert "Traceback" not in server.tail()
        assert "gpt17" in server.tail()
    finally:
        server.close()


def _refused(server: Server) -> bool:
    try:
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(100) == b""
    except (ConnectionRefusedError, ConnectionResetError):
        return True

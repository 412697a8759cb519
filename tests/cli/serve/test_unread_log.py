"""Routers and supervisors whose log nobody takes go on, and end when they are told to."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from helpers.serving.full_disk import can_mount, make_room, on_full_disk
from helpers.serving.server import Running, Server, eventually

SERVE = (sys.executable, "-m", "helpers.serving.mock_serve")


@contextlib.contextmanager
def stderr_that(takes: str) -> Generator[int]:
    """A descriptor whose writers would wait, or fail."""
    if takes == "full disk":
        end = os.open("/dev/full", os.O_WRONLY)
        yield end
        os.close(end)
        return
    reading, writing = os.pipe()
    if takes == "gone":
        os.close(reading)
    else:
        fill(writing)
    yield writing
    os.close(writing)
    if takes != "gone":
        os.close(reading)


def fill(pipe: int) -> None:
    """So that it takes no byte more."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


def many_requests(server: Server, count: int) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        for _ in range(count):
            connection.request("GET", "/health", headers={"X-Request-ID": "x" * 128})
            assert connection.getresponse().read()
    finally:
        connection.close()


def lost_lines(server: Server) -> float:
    text = server.get("/metrics").body.decode()
    found = re.findall(r"^headrace_log_lines_dropped_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(found) == 2, text
    return sum(map(float, found))


def is_ready(server: Server) -> bool:
    return server.workers().get("worker-0", {}).get("state") == "ready"


def streams(server: Server, tokens: int = 5) -> list[str]:
    body = {"model": "mock", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    with server.stream("/v1/completions", body) as events:
        return list(events)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("takes", ["nothing", "full disk", "gone"])
def test_a_router_serves_and_ends_though_nobody_takes_its_log(takes: str, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'r'}"
    with stderr_that(takes) as stderr:
        flags = ("--port", "0", "--worker-listen", listen, "--log-level", "trace")
        server = Server("router", *flags, stderr=stderr)
        worker: Running | None = None
        try:
            server.set_url(
                server.wait_line(r"(http://127\.0\.0\.1:\d+) for clients", timeout=60)[1]
            )
            worker = Running("mock", "--router", listen, "--workers", "1", "--name", "w")
            eventually(lambda: server.get("/ready").status == 200, worker.tail, 60)
            while not lost_lines(
                server
            ):  # 1 MiB waits before the first is lost, if nothing is taken
                many_requests(server, 500)
            assert server.get("/health").status == 200
            assert streams(server)[-1] == "[DONE]"
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.close()
            if worker is not None:
                worker.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("takes", ["nothing", "full disk"])
def test_serve_goes_on_and_ends_though_nobody_takes_its_log(takes: str) -> None:
    with stderr_that(takes) as stderr:
        flags = ("--port", "0", "--log-level", "trace")
        server = Server(*flags, program=SERVE, stderr=stderr)
        try:
            server.wait_ready()
            children = server.children()
            many_requests(server, 3_000)
            assert streams(server)[-1] == "[DONE]"
            server.worker_process("worker-").kill()
            eventually(lambda: not server.workers(), server.tail)
            eventually(lambda: is_ready(server), server.tail, 60)
            assert streams(server)[-1] == "[DONE]"
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert all(not child.is_running() for child in children)
        finally:
            server.close()


@pytest.mark.timeout(180)
def test_serve_starts_and_goes_on_with_a_full_disk(tmp_path: Path) -> None:
    """TMPDIR and the log are on it."""
    folder = tmp_path / "full"
    folder.mkdir()
    program = on_full_disk(folder, SERVE)
    server = Server("--port", "0", env={"TMPDIR": str(folder)}, program=program)
    try:
        server.wait_ready()
        assert streams(server)[-1] == "[DONE]"
        server.worker_process("worker-").kill()
        eventually(lambda: not server.workers(), server.tail)
        eventually(lambda: is_ready(server), server.tail, 60)
        if can_mount():
            log = make_room(folder, server.process.pid)
            server.worker_process("worker-").kill()  # which is worth a line
            eventually(
                lambda: "could not be written (No space left" in log.read_text(), log.read_text
            )
            eventually(lambda: "starting again" in log.read_text(), log.read_text)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.close()


@pytest.mark.timeout(180)
def test_a_start_that_fails_says_so_or_not_but_ends(tmp_path: Path) -> None:
    with stderr_that("nothing") as stderr:
        command = [sys.executable, "-m", "headrace", "router", "--port", "0"]
        done = subprocess.run(
            [*command, "--worker-listen", f"unix:{tmp_path}/no/such/folder/socket"],
            stderr=stderr,
            timeout=60,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert done.returncode == 1

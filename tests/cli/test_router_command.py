"""`headrace router` is the router's own program, flags and all."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.server import Running

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def router(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", "router", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENV,
    )


def test_help_is_the_routers() -> None:
    done = router("--help")
    assert done.returncode == 0
    assert "Usage: headrace router" in done.stdout
    for flag in ("--worker-listen", "--policy", "--drain-timeout-ms", "--api-key"):
        assert flag in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--policy", "dice"], "[possible values: kv, round-robin"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--port", "99999"], "99999"),
        (["--secret-file", "/nonexistent/secret"], "--secret-file: cannot read"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], why: str) -> None:
    done = router(*flags)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Usage: headrace router [OPTIONS]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    running = Running("router", "--port", "0", "--worker-listen", "127.0.0.1:0")
    try:
        running.wait_line(r"http://127\.0\.0\.1:\d+ for clients", timeout=60)
        running.process.send_signal(number)
        assert running.wait() == 0
    finally:
        running.close()


@pytest.mark.parametrize("runtime", ["shared", "per-core"])
def test_chats_are_answered_on_every_runtime_and_a_drain_waits_for_them(runtime: str) -> None:
    router = Running(
        *("router", "--port", "0", "--worker-listen", "127.0.0.1:0"), *("--runtime", runtime)
    )
    mock: Running | None = None
    try:
        listening = router.wait_line(
            r"http://(127\.0\.0\.1:\d+) for clients.*?(127\.0\.0\.1:\d+)", timeout=60
        )
        clients, workers = listening.groups()
        mock = Running("mock", "--router", workers, "--workers", "3", "--cost", "2,0,0,0,0")
        for shape in ([], ["--unary"]):
            report = load(clients, "-n", "96", "-c", "24", "--max-tokens", "8", *shape)
            assert (report["errors"], report["completion_tokens"]) == (0, 96 * 8)
        with urllib.request.urlopen(f"http://{clients}/metrics", timeout=30) as page:
            tasks = re.search(r"^headrace_tasks (\d+)$", page.read().decode(), re.MULTILINE)
        assert tasks is not None
        assert int(tasks[1]) > 3  # its own, and one for each link

        body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": 500, "stream": True})
        connection = http.client.HTTPConnection(clients, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(5) == b"data:"
        router.process.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert router.wait() == 0
    finally:
        if mock is not None:
            mock.close()
        router.close()


def load(clients: str, *flags: str) -> dict[str, Any]:
    """The report of a load on a router."""
    command = [sys.executable, "-m", "headrace", "bench", "load", "--target", clients, *flags]
    done = subprocess.run(
        [*command, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENV,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_terminal_gets_its_log_in_colour(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace", "router", "--port", "0"]
    listen = ["--worker-listen", f"unix:{tmp_path}/w.sock", "--log-level", "info"]
    with subprocess.Popen([*command, *listen], stderr=theirs, stdout=theirs, env=ENV) as router:
        try:
            os.close(theirs)
            shown = b""
            while b"INFO" not in shown:  # before or after the line of its addresses
                assert select.select([mine], [], [], 60.0)[0], shown
                shown += os.read(mine, 65_536)
        finally:
            router.terminate()
            os.close(mine)
    (line, *_) = [line for line in shown.splitlines() if b"INFO" in line]
    assert b"\x1b[" in line, shown

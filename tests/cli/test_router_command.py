"""`headrace router` is the router's own program, flags and all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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

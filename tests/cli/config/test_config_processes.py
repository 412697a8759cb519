"""A file of configuration with real processes: `serve`, its children, `router`, and SIGHUP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from helpers.serving.server import Running

SERVE = (sys.executable, "-m", "helpers.serving.mock_serve")


@contextmanager
def serving(*arguments: str, config: Path) -> Generator[tuple[Running, str]]:
    """`serve` with mock workers and this file in the environment, and its URL."""
    env = {"HEADRACE_CONFIG": str(config)}
    with closing(Running(*arguments, env=env, program=SERVE)) as running:
        yield running, running.wait_line(r"is ready after .*: (http://\S+)$")[1]


def reader(url: str, path: str, origin: str) -> str | None:
    """The origin that may read the answer."""
    request = urllib.request.Request(f"{url}{path}", headers={"Origin": origin})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.headers.get("Access-Control-Allow-Origin")


def test_serve_takes_its_table_and_its_children_take_no_other(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        "[serve]\nport = 0\npolicy = 'round-robin'\nmax-streams = 9\n"
        "allowed-origins = ['https://a.example']\n"
        # what the children would refuse
        "[router]\npolicy = 'nonsense'\n[worker]\nnonsense = 1\n"
    )
    with serving("--policy=least-loaded", config=path) as (running, url):
        assert reader(url, "/health", "https://a.example") == "https://a.example"
        children = psutil.Process(running.process.pid).children()
        command = next(one for child in children if "router" in (one := child.cmdline()))
        assert "--policy=least-loaded" in command, "the command line counts before the file"
        assert f"--config={path}" in command
        assert not any(word.startswith("--max-streams") for word in command), "the router reads it"


def test_a_hangup_of_serve_reaches_its_router_and_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    text = "[serve]\nworkers = 1\nport = 0\nlog-format = 'json'\n"
    path.write_text(text)
    with serving(config=path) as (running, url):
        assert reader(url, "/health", "https://a.example") is None
        path.write_text(f"{text}allowed-origins = ['https://a.example']\n")
        running.process.send_signal(signal.SIGHUP)
        running.wait_line('"read again, and in use".*"files":"config"')
        assert reader(url, "/health", "https://a.example") == "https://a.example"
        path.write_text("[serve]\nworkers = 2\nport = 0\nkv-memory = '1GiB'\n")
        running.process.send_signal(signal.SIGHUP)
        refused = running.wait_line(r'"files":"config","problem":"(.*?)"')[1]
        assert refused.startswith("--kv-memory, --log-format, --workers cannot change")
        assert reader(url, "/health", "https://a.example") == "https://a.example"


def test_headrace_router_is_the_same_program(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[router]\nport = 0\nworker-listen = '127.0.0.1:0'\npolicy = 'kvv'\n")
    with closing(Running("--config", str(path), "router")) as running:
        running.wait_line(rf"error: {path}:4: invalid value 'kvv'")
        assert running.wait() == 2
    path.write_text(path.read_text().replace("kvv", "kv"))
    with closing(Running("--config", str(path), "router")) as running:
        running.wait_line(r"headrace-router: http://")


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_a_wrong_file_ends_a_command_before_anything_starts(command: str, tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"[{command}]\nmax-seqences = 1\n")
    with closing(Running(command, "--config", str(path))) as running:
        running.wait_line(rf"error: {path}:2: .*did you mean max-sequences\?")
        assert running.wait() == 2


def test_a_pipe_that_nobody_reads_is_no_failure() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    show = [sys.executable, "-m", "headrace", "config", "show", "router"]
    done = subprocess.run(show, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")

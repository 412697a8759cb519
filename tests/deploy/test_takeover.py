"""A router takes the sockets that a service manager passes, says how it is, and is replaced without failed requests."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Self

import pytest

from helpers.serving.fleet import COSTS
from helpers.serving.server import Running, eventually
from helpers.serving.supervisor import Supervisor

MODEL = "mock"
CLIENTS = 6
TOKENS = 40


@pytest.fixture
def manager(tmp_path: Path) -> Generator[Supervisor]:
    supervisor = Supervisor(tmp_path, ["http", "workers", "admin"])
    yield supervisor
    supervisor.close()


def workers(manager: Supervisor, *flags: str) -> Running:
    router = f"127.0.0.1:{manager.port('workers')}"
    return Running("mock", "--router", router, "--workers", "2", "--model", MODEL, *flags)


def ask(port: int, *, stream: bool, tokens: int = TOKENS) -> str:
    """`ok`, or what was wrong, of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": MODEL, "prompt": "one two", "max_tokens": tokens, "stream": stream}
    body["ignore_eos"] = True
    head = {"Content-Type": "application/json", "Connection": "close"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            return f"status {answer.status}: {text}"
        if stream:
            return "ok" if text.rstrip().endswith("data: [DONE]") else f"broken: {text[-200:]}"
        count = json.loads(text)["usage"]["completion_tokens"]
        return "ok" if count == tokens else f"{count} tokens"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


class Load:
    """Clients that ask one request after the other, each on a new connection, until it is over."""

    def __init__(self, port: int) -> None:
        self.results: Counter[str] = Counter()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(port, number % 2 == 0))
            for number in range(CLIENTS)
        ]

    def _ask(self, port: int, stream: bool) -> None:
        while not self._over.is_set():
            result = ask(port, stream=stream)
            with self._lock:
                self.results[result] += 1

    @property
    def asked(self) -> int:
        return self.results.total()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(300)
def test_routers_follow_each_other_under_load_and_no_request_fails(manager: Supervisor) -> None:
    router = manager.start()
    manager.wait_said("READY=1")
    mock = workers(manager, "--cost", "5,0,0,0,0")  # an answer takes 0.2 s
    port = manager.port("http")
    try:
        with Load(port) as load:
            eventually(lambda: load.asked >= 2 * CLIENTS, lambda: str(load.results))
            for restart in range(2, 4):
                successor = manager.start()
                manager.wait_said("READY=1", times=restart)
                router.process.send_signal(signal.SIGTERM)
                assert router.wait() == 0, router.tail()
                router.close()
                router, before = successor, load.asked
                eventually(lambda before=before: load.asked >= before + 2 * CLIENTS, router.tail)
        assert set(load.results) == {"ok"}, load.results
        manager.wait_said("STOPPING=1", times=2)
    finally:
        mock.close()
        router.close()


def test_clients_wait_in_the_socket_while_there_is_no_router(manager: Supervisor) -> None:
    router = manager.start()
    mock = workers(manager, "--cost", COSTS)
    port = manager.port("http")
    try:
        assert ask(port, stream=True) == "ok"
        router.process.send_signal(signal.SIGTERM)
        assert router.wait() == 0, router.tail()
        router.close()
        with Load(port) as load:  # they dial now, and nobody accepts
            router = manager.start()
            eventually(lambda: load.asked >= CLIENTS, lambda: f"{load.results}\n{router.tail()}")
        assert set(load.results) == {"ok"}, load.results
    finally:
        mock.close()
        router.close()


def test_it_lives_reloads_and_stops_as_a_manager_expects(
    manager: Supervisor, tmp_path: Path
) -> None:
    keys = tmp_path / "admins.txt"
    keys.write_text("hr-of-an-operator\n")
    router = manager.start("--admin-key-file", str(keys), watchdog_s=0.2)
    try:
        manager.wait_said("READY=1")
        manager.wait_said("WATCHDOG=1", times=3)
        manager.wait_said("STATUS=no worker is ready, 0 answers in flight")
        router.process.send_signal(signal.SIGHUP)
        manager.wait_said("RELOADING=1")
        manager.wait_said("READY=1", times=2)
        router.process.send_signal(signal.SIGTERM)
        manager.wait_said("STOPPING=1")
        assert router.wait() == 0, router.tail()
        assert (tmp_path / "admin.sock").exists(), "it is the manager's"
    finally:
        router.close()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["http", "other"], "the names are http, workers and admin"),
        (["http", ""], "LISTEN_FDNAMES"),
    ],
)
def test_sockets_with_wrong_names_are_refused(
    tmp_path: Path, names: list[str], problem: str
) -> None:
    supervisor = Supervisor(tmp_path, names)
    try:
        router = supervisor.start()
        assert router.wait() == 2
        assert problem in router.tail()
        router.close()
    finally:
        supervisor.close()


def test_a_socket_that_others_reach_needs_keys_whatever_the_flags_say(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, ["workers"])
    supervisor.sockets["http"] = socket.create_server(("0.0.0.0", 0))
    try:
        router = supervisor.start("--host", "127.0.0.1")
        assert router.wait() == 2
        assert "can be reached by others" in router.tail()
        router.close()
    finally:
        supervisor.close()

"""Several routers and a worker that dials them all: real processes, and an etcd that comes and goes."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.etcd import EtcdServer
from helpers.serving.server import Running, Server, eventually

SECRET = {"HEADRACE_SECRET": "a secret of these tests"}
PROMPT = "The same long beginning of a prompt, of which both routers know who has it. " * 8


class Fleet:
    """What a test starts, and ends with it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def router(self, *flags: str) -> tuple[Server, str]:
        """A router and where workers dial it."""
        server = Server(
            *("router", "--port", "0", "--worker-listen", "127.0.0.1:0", *flags), env=SECRET
        )
        self._stack.callback(server.close)
        line = server.wait_line(r"(http://127\.0\.0\.1:\d+) for clients, (\S+) for workers")
        server.set_url(line[1])
        return server, line[2]

    def worker(self, routers: str, name: str = "w") -> Running:
        flags = ("--router", routers, "--name", name, "--context-tokens", "1024")
        worker = Running("worker", str(self._folder), *flags, env=SECRET)
        self._stack.callback(worker.close)
        return worker


@pytest.fixture
def fleet(tiny_folder: Path) -> Generator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tiny_folder, stack)


def ready(router: Server) -> None:
    eventually(
        lambda: router.workers().get("w", {}).get("state") == "ready",
        lambda: f"no worker: {router.workers()}\n{router.tail()}",
        timeout=120,
    )


def metric(router: Server, name: str, labels: str = "") -> float:
    lines = router.get("/metrics").body.decode().splitlines()
    found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and labels in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def complete(router: Server, **change: Any) -> dict[str, Any]:
    body = {"model": router.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    reply = router.post("/v1/completions", body | change)
    assert reply.status == 200, reply.body
    return reply.json


def test_each_router_has_the_full_view_and_serves_when_the_other_is_killed(fleet: Fleet) -> None:
    (one, at_one), (two, at_two) = fleet.router(), fleet.router()
    worker = fleet.worker(f"{at_one},{at_two}")
    ready(one)
    ready(two)
    answer = complete(one)
    # what the worker caches for one of them, both know
    eventually(
        lambda: metric(one, "headrace_index_blocks") == metric(two, "headrace_index_blocks") > 0,
        lambda: "the routers do not know the same blocks",
    )
    body = {"model": one.model, "prompt": "x", "max_tokens": 900, "ignore_eos": True}
    with one.stream("/v1/completions", body) as events:
        next(events)
        one.process.kill()
        one.process.wait(30)
        # at once, by the other one, and from the cache
        again = complete(two)
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert worker.process.poll() is None
    two.wait_idle()


def test_two_names_of_one_router_are_one_link(fleet: Fleet) -> None:
    router, at = fleet.router()
    worker = fleet.worker(f"{at},localhost:{at.rsplit(':', 1)[1]}")
    ready(router)
    worker.wait_line("a second way to router-", timeout=60)
    assert metric(router, "headrace_links_total") == 1
    complete(router)
    assert metric(router, "headrace_links_total") == 1


def test_routers_are_found_in_etcd_and_outlive_it(fleet: Fleet, etcd: EtcdServer) -> None:
    prefix = f"etcd:{etcd.endpoint}/test/routers"
    worker = fleet.worker(prefix)  # before there is any router
    register = ("--register", prefix, "--register-ttl-s", "5")
    one, at_one = fleet.router(*register)
    two, at_two = fleet.router(*register)
    ready(one)
    ready(two)
    addresses = [value.decode() for value in etcd.keys(b"test/routers/").values()]
    assert all(any(at in value for value in addresses) for at in (at_one, at_two))
    assert metric(one, "headrace_discovery_registered") == 1
    # etcd down: everything goes on, and says so
    etcd.kill()
    complete(one)
    worker.wait_line("discovery etcd_failed", timeout=60)
    unreachable = "etcd_unreachable"
    eventually(
        lambda: metric(one, "headrace_discovery_errors_total", unreachable) > 0,
        lambda: f"not counted: {one.tail()}",
    )
    complete(two)
    # back, without anything it knew: the routers register again
    etcd.wipe()
    etcd.start()
    eventually(
        lambda: len(etcd.keys(b"test/routers/")) == 2,
        lambda: f"not registered again: {etcd.keys(b'')}\n{one.tail()}",
        timeout=60,
    )
    # killed, a router is forgotten when its lease ends; told to stop, at once
    one.process.kill()
    eventually(
        lambda: len(etcd.keys(b"test/routers/")) == 1,
        lambda: "its lease does not end",
        timeout=60,
    )
    complete(two)
    worker.wait_line(f"{at_one}: its address is gone", timeout=60)
    two.process.send_signal(signal.SIGTERM)
    assert two.wait() == 0
    assert etcd.keys(b"test/routers/") == {}
    assert worker.process.poll() is None
    # and a new one is found by the worker that never stopped
    three, _ = fleet.router(*register)
    ready(three)
    complete(three)

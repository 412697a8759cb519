"""Workers that leave or die under `headrace serve`, with real processes: the service goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from headrace.cli.client import chat
from headrace.cli.private_folder import parents
from helpers.serving.server import Running, Server, eventually

SERVE = (sys.executable, "-m", "helpers.serving.mock_serve")
KNOWN = {"HEADRACE_SECRET": "of these workers"}
OFTEN = 8  # more than the crashes after which a worker that never was ready is given up

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server() -> Generator[Server]:
    server = Server("--port", "0", program=SERVE)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def completion(server: Server) -> int:
    body = {"model": "mock", "prompt": "hello", "max_tokens": 3}
    return server.post("/v1/completions", body).status


def test_drains_are_no_crashes_however_many(server: Server) -> None:
    for times in range(1, OFTEN + 1):
        drained = server.post("/workers/worker-0/drain", {"budget_ms": 1_000, "hand_over": 0})
        assert drained.status == 202, drained.body
        server.wait_line("left in good order; starting again", times=times, timeout=60)
        server.wait_line("ready, serves mock", times=1 + times, timeout=60)
        assert completion(server) == 200
    assert "keeps crashing" not in server.tail(1_000)


def test_the_only_worker_may_be_killed_however_often(server: Server) -> None:
    for times in range(1, OFTEN + 1):
        server.worker_process("worker-").kill()
        server.wait_line("was killed by SIGKILL", times=times, timeout=60)
        server.wait_line("ready, serves mock", times=1 + times, timeout=60)
    assert completion(server) == 200


def test_without_its_only_worker_the_router_answers_503(server: Server) -> None:
    worker = server.worker_process("worker-")
    with server.stopped():  # so that nobody starts it again
        worker.kill()
        eventually(lambda: not server.workers(), lambda: str(server.workers()))
        assert completion(server) == 503
        assert server.get("/health").status == 200
    server.wait_line("ready, serves mock", times=2, timeout=60)
    assert completion(server) == 200


def test_the_router_may_be_killed_however_often(server: Server) -> None:
    for times in range(1, OFTEN + 1):
        [router] = [one for one in server.children() if "router" in one.cmdline()]
        router.kill()
        server.wait_line("router +. was killed by SIGKILL", times=times, timeout=60)
        server.wait_line("http://.* for clients", times=1 + times, timeout=60)
    eventually(lambda: completion(server) == 200, server.tail, 60)


def test_a_worker_that_never_gets_ready_ends_it_with_the_reason() -> None:
    server = Server("--port", "0", "--max-sequences", "1", env={"MOCK_FAILS": "1"}, program=SERVE)
    try:
        assert server.wait(60) == 1
        assert (
            "worker-0 keeps crashing (it ended with status 3); its last line was: no luck"
            in server.tail()
        )
    finally:
        server.close()


def test_a_second_signal_ends_it_though_a_worker_does_not_listen(server: Server) -> None:
    children = server.children()
    for child in children:
        child.suspend()
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("stopping: running answers may finish", timeout=60)
    server.process.send_signal(signal.SIGINT)
    assert server.wait(30) == 128 + signal.SIGINT
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_answers_with_an_error(server: Server, number: signal.Signals) -> None:
    children = server.children()
    body = {"model": "mock", "prompt": "hello", "max_tokens": 1_000}
    with server.stream("/v1/completions", body) as events, server.frozen("worker-"):
        next(events)
        server.process.send_signal(number)
        server.wait_line("stopping: running answers may finish", timeout=60)
        server.process.send_signal(number)
        rest = list(events)
    assert json.loads(rest[-1])["error"]["code"] == "shutting_down"
    assert server.wait(30) == 128 + number
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--port=3", "--port: it was given twice"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--api-key-file=/nonexistent", "--api-key-file: cannot read /nonexistent"),
        ("--heartbeat-ms=4000", "--heartbeat-timeout-ms: is 10000"),
    ],
)
def test_what_the_router_would_refuse_starts_nothing(flags: str, why: str) -> None:
    server = Server("--port", "0", flags, program=SERVE)
    try:
        assert server.wait(60) == 2
        assert why in server.tail()
        assert "sage: headrace serve [FLAGS] [MODEL]" in server.tail()
        assert "starting the router" not in server.tail()
    finally:
        server.close()


def test_workers_of_other_machines_join_where_serve_listens_for_them(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/workers"
    server = Server("--port=0", f"--worker-listen={address}", program=SERVE, env=KNOWN)
    other: Running | None = None
    try:
        server.wait_ready()
        mock = ("mock", "--workers=1", "--name=other-", f"--router={address}")
        other = Running(*mock, env=KNOWN)
        eventually(lambda: {"worker-0", "other-0"} <= server.workers().keys(), server.tail, 60)
        assert completion(server) == 200
    finally:
        server.close()
        if other is not None:
            other.close()


def test_others_may_be_let_in_and_operators_have_another_address(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin"
    flags = (f"--admin-listen={address}", "--allowed-hosts=my.host", "--allowed-origins=http://a")
    server = Server("--port", "0", *flags, program=SERVE)
    try:
        server.wait_ready()
        assert server.send("GET", "/v1/models", headers={"Host": "my.host"}).status == 200
        assert server.send("GET", "/v1/models", headers={"Host": "its.host"}).status == 421
        with closing(chat.Server(address).request("GET", "/workers")) as answer:
            assert [one["id"] for one in json.load(answer)["workers"]] == ["worker-0"]
    finally:
        server.close()


def test_signals_end_a_supervisor_that_does_not_run_its_loop() -> None:
    """Its Python may be stuck in a call that holds the GIL: the second signal ends it all the same."""
    code = (
        "import asyncio, ctypes, signal\n"
        "from headrace import _core\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGTERM, lambda: print('never', flush=True))\n"
        "    _core.end_on_signals([signal.SIGTERM], None)\n"
        "    print('stuck', flush=True)\n"
        "    while True:\n"
        "        ctypes.PyDLL(None).pause()\n"  # PyDLL keeps the GIL
        "asyncio.run(main())\n"
    )
    server = Server(program=(sys.executable, "-c", code))
    try:
        server.wait_line("stuck", timeout=60)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.2)  # the first one only asks
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 128 + signal.SIGTERM
        assert "never" not in server.tail()
    finally:
        server.close()


def test_the_next_start_removes_the_folder_of_one_that_was_killed(server: Server) -> None:
    [socket] = [
        argument.removeprefix("--worker-listen=unix:")
        for child in server.children()
        for argument in child.cmdline()
        if argument.startswith("--worker-listen=unix:")
    ]
    children = server.children()
    server.process.kill()
    psutil.wait_procs(children, timeout=60)
    folder = next(place for place in parents() if str(place) == socket.rsplit("/", 2)[0])
    name = socket.rsplit("/", 2)[1]
    assert (folder / name).exists()
    assert all(entry.is_socket() for entry in (folder / name).iterdir()), "there is no secret"
    after = Server("--port", "0", program=SERVE)
    try:
        after.wait_ready()
        assert not (folder / name).exists()
    finally:
        after.close()

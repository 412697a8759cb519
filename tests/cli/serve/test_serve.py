"""`headrace serve` around its processes: fetching, readiness, signals. The whole of it runs in tests/e2e."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.cli import console, serve
from headrace.cli.console import Printer, StopSignals
from headrace.cli.serving import announce, commands
from headrace.cli.serving.config import ServeSettings
from headrace.cli.serving.model import ServedAs, fetch_model
from headrace.cli.supervise import Keeper, ToldWrongError
from headrace.settings.fleet import FleetSettings
from headrace.settings.values import SettingsError
from helpers.serving.processes import until_gone

SETTINGS = ServeSettings(
    host="127.0.0.1",
    port=1,
    roles=("both", "both"),
    model=None,
    worker_argv=[],
    router_argv=[],
    drain_timeout_s=1.0,
)

SERVED_AS = ServedAs(device="cpu", dtype="int8")


@dataclass(eq=False)
class FakeKeeper:
    """What `announce` sees of a worker's keeper."""

    name: str
    starts: int = 1
    running: bool = True
    ended: bool = False
    was_ready: int = 0

    def ready(self) -> None:
        self.was_ready += 1

    @property
    def command(self) -> Any:
        return SimpleNamespace(name=self.name)


async def announced(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: list[FakeKeeper],
    answers: Iterator[dict[str, str] | None],
    *,
    asked_s_ago: float = 0.0,
    config: ServeSettings = SETTINGS,
) -> str:
    """What stdout got until the URL was printed. The router answers `answers`, one after the other."""
    printed = asyncio.Event()
    print_ready = announce.print_ready

    def and_tell(*arguments: Any) -> None:
        print_ready(*arguments)
        printed.set()

    monkeypatch.setattr(announce, "POLL_S", 0.0)
    monkeypatch.setattr(announce, "print_ready", and_tell)
    monkeypatch.setattr(announce, "ready_workers", lambda _: next(answers))
    keepers = cast("list[Keeper]", workers)
    began = time.monotonic() - asked_s_ago
    router = cast("Keeper", FakeKeeper("router"))
    announcing = asyncio.create_task(
        announce.announce(config, SERVED_AS, router, keepers, Printer(["worker-0"]), began)
    )
    waiting = asyncio.create_task(printed.wait())
    try:
        async with asyncio.timeout(20):
            await asyncio.wait({announcing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done():
            await announcing  # raises why
    finally:
        for task in (announcing, waiting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return capsys.readouterr().out


async def test_a_long_fetch_takes_no_time_from_the_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = FakeKeeper("worker-0")

    def answers() -> Iterator[dict[str, str] | None]:
        yield None
        yield {}
        assert not worker.was_ready
        while True:
            yield {"worker-0": "m"}

    out = await announced(
        monkeypatch,
        capsys,
        [worker],
        answers(),
        asked_s_ago=2 * announce.START_TIMEOUT_S,
    )
    assert worker.was_ready == 1, "which its restarts go by"
    assert "http://127.0.0.1:1" in out
    assert '"model": "m"' in out


async def test_the_url_comes_when_the_last_late_worker_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [FakeKeeper("worker-0"), FakeKeeper("worker-1", running=False)]

    def answers() -> Iterator[dict[str, str] | None]:
        yield {"worker-0": "m"}
        workers[1].ended = True
        while True:
            yield None  # the router is busy just now

    out = await announced(monkeypatch, capsys, workers, answers())
    assert '"model": "m"' in out


class ReturningKeeper(FakeKeeper):
    """Of a worker that is given up, and there again once somebody has looked a few times."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "ended":
            self.looks += 1
            return self.looks < 10
        return super().__getattribute__(name)


async def test_the_url_waits_for_a_worker_that_answers_can_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(SETTINGS, roles=("prefill", "decode"))
    decode = ReturningKeeper("decode-0")
    listed: dict[str, str] = {"prefill-0": "m"}

    def answers() -> Iterator[dict[str, str] | None]:
        while True:
            yield listed | ({"decode-0": "m"} if decode.looks >= 10 else {})

    workers = [FakeKeeper("prefill-0"), decode]
    out = await announced(monkeypatch, capsys, workers, answers(), config=config)
    assert "http://127.0.0.1:1" in out
    assert decode.looks >= 10, "prompts alone are no service"


@pytest.mark.parametrize("state", ["joining", "suspect", "draining"])
def test_a_worker_counts_once_it_takes_requests(state: str, tmp_path: Path) -> None:
    listed = [{"id": "worker-0", "model": "m", "state": "ready"}]
    listed.append({"id": "worker-1", "model": "m", "state": state})
    config = replace(SETTINGS, admin=tmp_path / "admin.sock")
    assert announce.ready_workers(config) is None, "there is no router yet"
    with workers_page(tmp_path / "admin.sock", {"workers": listed}):
        assert announce.ready_workers(config) == {"worker-0": "m"}


@contextlib.contextmanager
def workers_page(socket_file: Path, page: object) -> Generator[None]:
    """A router that tells of its workers, once."""
    body = json.dumps(page).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_file))
        listener.listen(1)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(head + body)

        answering = threading.Thread(target=answer)
        answering.start()
        yield
        answering.join()


async def test_the_ready_lines_say_what_the_weights_became(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, rest in (("auto", "; --dtype float32 leaves the weights as they are"), ("int8", "")):
        config = replace(SETTINGS, dtype=dtype)
        announce.print_ready(config, "m", SERVED_AS, 1.0)
        assert f"\nm in int8 on the CPU{rest}\n" in capsys.readouterr().out
    logged: list[str] = []

    def log(_: Printer, name: str, line: str) -> None:
        logged.append(f"{name}: {line}")

    monkeypatch.setattr(Printer, "__call__", log)
    workers = [FakeKeeper("worker-0"), FakeKeeper("worker-1", ended=True)]
    listed: dict[str, str] | None = {"worker-0": "m"}
    await announced(monkeypatch, capsys, workers, itertools.repeat(listed))
    assert logged == ["worker-0: ready, serves m in int8 on the CPU"]


@pytest.mark.parametrize("place", ["router_argv", "router_reads"])
def test_the_ready_lines_name_the_page_where_there_is_one(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "shows what it does, in a browser"
    announce.print_ready(SETTINGS, "m", SERVED_AS, 1.0)
    assert page in capsys.readouterr().out
    apart = replace(SETTINGS, **{place: ["--admin-listen-only"]})
    announce.print_ready(apart, "m", SERVED_AS, 1.0)
    assert page not in capsys.readouterr().out


async def test_a_service_of_prompts_alone_ends(capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SETTINGS, roles=("prefill", "decode"))
    told = ToldWrongError("decode-0 cannot do what it was told: no GPU", 78)

    async def forever() -> None:
        await asyncio.Event().wait()

    async def refuses() -> None:
        raise told

    router = FakeKeeper("router")
    keepers = [router, FakeKeeper("prefill-0"), FakeKeeper("decode-0")]
    tasks = [asyncio.create_task(one()) for one in (forever, forever, refuses)]
    watcher = asyncio.create_task(forever())
    running = cast("dict[asyncio.Task[None], Keeper]", dict(zip(tasks, keepers, strict=True)))
    try:
        async with asyncio.timeout(20):
            status = await serve.until_stop_or_failure(
                config, running, cast("Keeper", router), watcher, StopSignals(), Printer(["x"])
            )
    finally:
        for task in (watcher, *tasks):
            task.cancel()
        await asyncio.gather(watcher, *tasks, return_exceptions=True)
    assert status == 78, "the worker's own"
    assert "no GPU" in capsys.readouterr().err


async def test_what_the_model_becomes_comes_from_the_fetch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch = tmp_path / "fetch"
    fetch.write_text('#!/bin/sh\necho "{\\"device\\": \\"cpu\\", \\"dtype\\": \\"$6\\"}"\n')
    fetch.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fetch))
    config = replace(SETTINGS, dtype="float16")
    found = await fetch_model(config, StopSignals(), Printer(["headrace"]))
    assert found == ServedAs(device="cpu", dtype="--dtype=float16")


async def test_stopping_while_the_model_is_fetched_ends_the_download_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fetch = tmp_path / "fetch"
    fetch.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {fifo}\nwait\n")
    fetch.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fetch))
    stop = StopSignals()
    fetching = asyncio.create_task(fetch_model(SETTINGS, stop, Printer(["headrace"])))
    async with asyncio.timeout(20):
        download = int(await asyncio.to_thread(fifo.read_text))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await fetching == 128 + signal.SIGTERM
    await until_gone(download)


async def test_a_failed_fetch_ends_it_with_the_same_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch = tmp_path / "fetch"
    fetch.write_text("#!/bin/sh\nexit 7\n")
    fetch.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fetch))
    config = replace(SETTINGS, model="org/name")
    assert await fetch_model(config, StopSignals(), Printer(["headrace"])) == 7


async def test_a_hangup_has_files_read_again_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = asyncio.Event()
    stop = StopSignals(read.set)
    assert signal.SIGHUP not in stop.ending and signal.SIGTERM in stop.ending
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(20):
        await read.wait()
    assert not stop.soon.is_set()
    # the kernel sends it when a terminal is closed
    monkeypatch.setattr(console, "has_terminal", lambda: True)
    closed = StopSignals(read.set)
    monkeypatch.setattr(console, "has_terminal", lambda: False)
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(20):
        await closed.soon.wait()
    assert closed.last_signal == signal.SIGHUP


@pytest.mark.parametrize(
    ("argv", "scheme", "reloads"),
    [
        ([], "http", False),
        (["--policy=kv"], "http", False),
        (["--api-key-file=k"], "http", True),
        (["--tls-cert=c", "--tls-key=k"], "https", True),
        (["--worker-tls-cert=c"], "http", True),
        (["--config=f.toml"], "http", True),
    ],
)
def test_the_url_and_what_is_read_again_are_the_routers(
    argv: list[str], scheme: str, reloads: bool
) -> None:
    config = replace(SETTINGS, router_argv=argv)
    assert config.url.startswith(f"{scheme}://")
    assert config.reloads == reloads


async def test_nohup_keeps_it_from_stopping_with_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignals()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await stop.soon.wait()
        assert not stop.now.is_set()
        assert stop.last_signal == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "roles", "names"),
    [
        (None, None, None, ("both",), ["worker-0"]),
        (2, None, None, ("both", "both"), ["worker-0", "worker-1"]),
        (None, 2, 1, ("prefill", "prefill", "decode"), ["prefill-0", "prefill-1", "decode-0"]),
    ],
)
def test_each_worker_has_a_role_and_a_name_for_it(
    workers: int | None,
    prefill: int | None,
    decode: int | None,
    roles: tuple[str, ...],
    names: list[str],
) -> None:
    assert FleetSettings(workers=workers, prefill=prefill, decode=decode).roles() == roles
    config = replace(SETTINGS, roles=roles)
    assert config.names == names
    started = [
        commands.worker_command(config, Path("/f"), name, role)
        for name, role in zip(config.names, roles, strict=True)
    ]
    for command, name, role in zip(started, names, roles, strict=True):
        assert command.name == name
        assert f"--name={name}" in command.argv
        assert f"--role={role}" in command.argv


@pytest.mark.parametrize(
    ("started_as", "on_path", "typed"),
    [
        ("bin/headrace", "bin", "headrace"),
        ("bin/headrace", "elsewhere", "{0}/bin/headrace"),
        ("bin/headrace", "nowhere", "{0}/bin/headrace"),
        ("headrace/__main__.py", "bin", f"{sys.executable} -m headrace"),
    ],
)
def test_what_to_type_is_found_by_a_shell(
    started_as: str, on_path: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "headrace").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / on_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / started_as)])
    assert announce.program() == typed.format(tmp_path)


def test_the_secret_is_in_the_environment_of_the_children_and_nowhere_else() -> None:
    config = replace(SETTINGS, secret="s3cr3t")
    folder = Path("/f")
    for command in (
        commands.router_command(config, folder),
        commands.worker_command(config, folder, "worker-0", "both"),
    ):
        assert command.env["HEADRACE_SECRET"] == "s3cr3t"
        assert "s3cr3t" not in " ".join(command.argv)
    assert "s3cr3t" not in repr(config)
    for command in (
        commands.router_command(SETTINGS, folder),
        commands.worker_command(SETTINGS, folder, "worker-0", "both"),
    ):
        assert "HEADRACE_SECRET" not in command.env, "they have it from a file or from us"


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "says"),
    [
        (2, 1, 1, "one or the other"),
        (1, None, 1, "one or the other"),
        (None, 1, None, "--prefill needs --decode"),
        (None, None, 3, "--decode needs --prefill"),
    ],
)
def test_numbers_of_workers_that_make_no_service_are_refused(
    workers: int | None, prefill: int | None, decode: int | None, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        FleetSettings(workers=workers, prefill=prefill, decode=decode).roles()

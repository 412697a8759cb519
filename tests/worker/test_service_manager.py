"""What a worker tells a service manager: to a real socket, and nothing that is for another process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.errors import CannotRun
from headrace.worker.service_manager import ServiceManager, keep_told, read_service_manager

PID = 77


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[tuple[str, socket.socket]]:
    """NOTIFY_SOCKET, and the manager's end of it."""
    path = str(tmp_path / "notify")
    name = path if request.param == "path" else f"@{path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        manager.setblocking(False)
        yield name, manager


def test_a_manager_hears_each_message_as_one_datagram(heard: tuple[str, socket.socket]) -> None:
    name, socket_ = heard
    manager = read_service_manager({"NOTIFY_SOCKET": name}, PID)
    manager.tell("READY=1", "STATUS=there")
    manager.tell("STOPPING=1")
    assert socket_.recv(256) == b"READY=1\nSTATUS=there"
    assert socket_.recv(256) == b"STOPPING=1"


async def test_signs_of_life_come_every_time_and_the_status_when_it_changes(
    heard: tuple[str, socket.socket],
) -> None:
    name, socket_ = heard
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"}
    manager = read_service_manager(environment, PID)
    pauses: list[float] = []
    states = iter(["a", "a", "b", "b"])

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    with suppress(asyncio.CancelledError):
        await keep_told(manager, lambda: next(states), pause)
    assert [socket_.recv(256).split(b"\n") for _ in range(4)] == [
        [b"WATCHDOG=1", b"STATUS=a"],
        [b"WATCHDOG=1"],
        [b"WATCHDOG=1", b"STATUS=b"],
        [b"WATCHDOG=1"],
    ]
    assert pauses == [0.5] * 4


async def test_without_a_watchdog_nothing_is_said_where_nothing_changes(
    heard: tuple[str, socket.socket],
) -> None:
    name, socket_ = heard
    manager = read_service_manager({"NOTIFY_SOCKET": name}, PID)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    with suppress(asyncio.CancelledError):
        await keep_told(manager, lambda: "a", pause)
    assert socket_.recv(256) == b"STATUS=a"
    with pytest.raises(BlockingIOError):
        socket_.recv(256)


async def test_without_a_manager_nothing_is_kept_told() -> None:
    await keep_told(ServiceManager(), lambda: "never asked")
    ServiceManager().tell("READY=1")


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID)}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "", "NOTIFY_SOCKET": ""}, None),
    ],
)
def test_signs_of_life_are_for_the_process_that_is_named(
    environment: dict[str, str], watchdog_s: float | None
) -> None:
    assert read_service_manager(environment, PID) == ServiceManager(None, watchdog_s)


@pytest.mark.parametrize(
    "environment",
    [
        *({"WATCHDOG_USEC": text} for text in ("0", "-1", "1.5", "soon")),
        *({"NOTIFY_SOCKET": text} for text in ("@", "/", "run/notify", "vsock:2:1")),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environment: dict[str, str]) -> None:
    (name,) = environment
    with pytest.raises(CannotRun, match=name):
        read_service_manager(environment, PID)


def test_a_manager_that_is_gone_or_does_not_read_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "notify")
    manager = read_service_manager({"NOTIFY_SOCKET": path}, PID)
    manager.tell("READY=1")
    assert "was not told" in caplog.text
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(path)
        for _ in range(2_000):  # more than its socket holds
            manager.tell("WATCHDOG=1")

"""Who may have a control link, and what strangers cost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.worker.parallel import control
from headrace.worker.parallel.control import (
    ControlLink,
    GroupFailed,
    accept_ranks,
    dial_rank_0,
    listening,
)
from headrace.worker.parallel.messages import Kind, Message

EPOCH, TOKEN = 7, bytes(range(32))


@pytest.fixture(params=["unix", "tcp"])
def rank_0(request: pytest.FixtureRequest) -> Iterator[tuple[str, threading.Thread, list[object]]]:
    """Rank 0 of two, which waits for rank 1: its address, the thread that waits, and what came of it."""
    found: list[object] = []
    host = None if request.param == "unix" else "127.0.0.1"
    with listening(host) as (listener, address):

        def wait() -> None:
            try:
                found.append(accept_ranks(listener, 2, EPOCH, TOKEN, time.monotonic() + 30))
            except GroupFailed as error:
                found.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        yield address, waiting, found
        if not found:  # let it end
            dial_rank_0(address, 1, EPOCH, TOKEN, _soon()).close()
        waiting.join()
        for links in found:
            if isinstance(links, dict):
                links[1].close()


def _soon() -> float:
    return time.monotonic() + 60


@pytest.mark.parametrize(
    ("rank", "epoch", "token", "why"),
    [
        (1, EPOCH - 1, TOKEN, "of rank 1 of an earlier start of this group: epoch 6, not 7"),
        (1, EPOCH, bytes(32), "of rank 1 lacks the token of this group"),
        (1, EPOCH, b"short", "did not begin with a greeting"),
        (2, EPOCH, TOKEN, "is of rank 2 of 2"),
        (0, EPOCH, TOKEN, "is of rank 0 of 2"),
    ],
)
def test_a_stranger_gets_no_link_and_the_reason(
    rank_0: tuple[str, threading.Thread, list[object]],
    rank: int,
    epoch: int,
    token: bytes,
    why: str,
) -> None:
    with pytest.raises(GroupFailed, match=f"rank 0 refused rank {rank}: this link .*{why}"):
        dial_rank_0(rank_0[0], rank, epoch, token, _soon())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", Message(Kind.WAKE, 1).packed(), b"\0" * 64, b""]
)
def test_garbage_does_not_keep_a_rank_from_joining(
    rank_0: tuple[str, threading.Thread, list[object]], sent: bytes
) -> None:
    address, waiting, found = rank_0
    with dialled(address) as stranger:
        stranger.sendall(sent)
        link = dial_rank_0(address, 1, EPOCH, TOKEN, _soon())
        waiting.join()
        [links] = found
        assert isinstance(links, dict)
        assert isinstance(links[1], ControlLink)
        link.close()


@pytest.mark.parametrize("rank_0", ["tcp"], indirect=True)
def test_strangers_that_say_nothing_are_few_and_told_so_in_the_end(
    rank_0: tuple[str, threading.Thread, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have room for twelve."""
    address, waiting, found = rank_0
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dialled(address)) for _ in range(13)]
        for one in strangers:
            one.settimeout(60)
        assert strangers[12].recv(100) == b""
        monkeypatch.setattr(control, "GREETING_S", 0.0)
        for one in strangers[:12]:
            assert b"no greeting came within 0 s" in one.recv(100)
        monkeypatch.undo()
        dial_rank_0(address, 1, EPOCH, TOKEN, _soon()).close()
    waiting.join()
    assert isinstance(found[0], dict)


def test_a_rank_joins_once() -> None:
    with listening(None) as (listener, address), ThreadPoolExecutor(1) as threads:
        joined = threads.submit(accept_ranks, listener, 3, EPOCH, TOKEN, time.monotonic() + 60)
        first = dial_rank_0(address, 1, EPOCH, TOKEN, _soon())
        with pytest.raises(GroupFailed, match=r"rank 0 refused rank 1: .* is of a second rank 1"):
            dial_rank_0(address, 1, EPOCH, TOKEN, _soon())
        second = dial_rank_0(address, 2, EPOCH, TOKEN, _soon())
        links = joined.result()
        assert sorted(links) == [1, 2]
        for link in (first, second, *links.values()):
            link.close()


def dialled(address: str) -> socket.socket:
    if address.startswith("unix:"):
        one = socket.socket(socket.AF_UNIX)
        one.connect(address.removeprefix("unix:"))
        return one
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))

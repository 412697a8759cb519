"""How a worker tells of a link that breaks: with a warning, unless it had said goodbye."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Self, cast

import pytest

from headrace.errors import LinkLost
from headrace.wire.frames import Bye
from headrace.wire.link import Session
from headrace.worker.sessions import Joined, Sessions


class BrokenPipe:
    """A session whose router is gone by the second time that something is sent to it."""

    router, heartbeat_s = "router-a", 60.0

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()  # the end of the link is not read before it is written to

    async def send(self, *_: Any) -> None:
        if self.sent.is_set():
            raise LinkLost("the link broke: [Errno 32] Broken pipe")
        self.sent.set()


@pytest.mark.parametrize(("bye", "level"), [(Bye("a drain"), "INFO"), (None, "WARNING")])
async def test_a_broken_pipe_after_a_goodbye_is_no_warning(
    caplog: pytest.LogCaptureFixture, bye: Bye | None, level: str
) -> None:
    caplog.set_level(logging.INFO)
    session = BrokenPipe()
    sessions = Sessions(cast("Any", None), b"{}")
    talking = asyncio.create_task(sessions.talk(cast("Session", session)))
    joined = await sessions.inbox.get()
    assert joined is not None
    assert isinstance(joined.what, Joined)
    joined.peer.outbox.bye = bye
    joined.peer.wake.set()
    await session.sent.wait()
    joined.peer.wake.set()
    await talking
    [record] = [record for record in caplog.records if "Broken pipe" in record.getMessage()]
    assert record.levelname == level

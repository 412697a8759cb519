"""A client of KV transfers that moves nothing: its pulls end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.kv_transfer.backends.base import BoundTicket, Pulled
from headrace.wire.frames import KvFrom, TransferBackend
from helpers.kv.pull_keys import PULL_KEY

DONE = Pulled(backend=TransferBackend.SHM, blocks=1, bytes=64, ms=0.5, total_ms=1.0)
SOURCE = KvFrom("p", ["tcp:127.0.0.1:1"], 1000, PULL_KEY)


class FakeClient:
    """Pulls end when the test says so; one that is cancelled needs a while to stop."""

    def __init__(self) -> None:
        self.started: list[bytes] = []  # tickets
        self.ends: dict[bytes, asyncio.Future[Pulled]] = {}
        self.writing: set[bytes] = set()
        self.another = asyncio.Event()
        self.stops = asyncio.Event()

    async def pull(
        self,
        _: Sequence[str],
        bound: BoundTicket,
        wanted: Sequence[tuple[int, int]],
        *,
        timeout_s: float,
    ) -> Pulled:
        assert timeout_s > 0
        assert wanted
        assert bound.pull_key == PULL_KEY
        ticket = bound.ticket
        self.started.append(ticket)
        self.another.set()
        self.writing.add(ticket)
        self.ends[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await self.ends[ticket]
        except asyncio.CancelledError:
            await self.stops.wait()
            raise
        finally:
            self.writing.discard(ticket)

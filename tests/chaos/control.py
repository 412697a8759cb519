"""The harness's end of the socket on which workers, and the processes that fork them, tell what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

Listen = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ControlServer:
    """Has `listen` hear each connection until one of the two ends it, or the harness stops."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._listen(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

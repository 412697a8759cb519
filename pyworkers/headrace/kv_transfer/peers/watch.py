"""What keeps a connection honest: its tasks end together, and a silent peer ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.kv_transfer.backends.base import Limits, LinkBroken
from headrace.kv_transfer.peers.stream import Stream


async def watch(
    stream: Stream,
    limits: Limits,
    beat: Callable[[], None],
    *tasks: Coroutine[Any, Any, None],
) -> None:
    """Run `tasks` until one of them fails or the peer is silent, or takes nothing, for too long.

    Calls `beat` every heartbeat. Raises LinkBroken; any other failure of a task is a bug and is raised as it is.
    """
    running = [asyncio.ensure_future(task) for task in (*tasks, _heartbeat(stream, limits, beat))]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        stream.close("the connection ended")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _heartbeat(stream: Stream, limits: Limits, beat: Callable[[], None]) -> None:
    """Counts heartbeats, not seconds: after this process itself stood still, one beat may pass before we hear again."""
    unheard = untaken = 0
    while True:
        stream.heard = stream.taken = False
        await asyncio.sleep(limits.heartbeat_s)
        unheard = 0 if stream.heard else unheard + 1
        untaken = untaken + 1 if stream.blocked and not stream.taken else 0
        if unheard >= limits.missed_heartbeats:
            raise LinkBroken(f"the peer said nothing for {unheard} heartbeats")
        if untaken >= limits.missed_heartbeats:
            raise LinkBroken(f"the peer took nothing for {untaken} heartbeats")
        beat()

"""Processes that are not our children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal


async def until_gone(pid: int) -> None:
    """Wait until the process has ended; kill it if it does not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), 60)
    finally:
        loop.remove_reader(fd)
        os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

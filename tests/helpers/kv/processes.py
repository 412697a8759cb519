"""Sources and pullers as processes (`process.py`), as a test sees them."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def process(*arguments: str) -> AsyncGenerator[Process]:
    paths = [str(TESTS), *sys.path]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "helpers.kv.process", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        assert child.stdin is not None
        child.stdin.close()
        with suppress(ConnectionError):
            await child.stdin.wait_closed()


async def line(child: Process) -> str:
    assert child.stdout is not None
    async with asyncio.timeout(30):
        return (await child.stdout.readline()).decode().strip()


def tell(child: Process, text: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{text}\n".encode())

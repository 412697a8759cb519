"""What ends a process or keeps it from ending: logs that nobody reads, signals, addresses, keys. One process each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from attack.attack import Outcome, Scale, Trial
from attack.stack import Programs, start_router, start_workers, status_of, until_ready
from attack.wire import Reply, ask, post, send, tally

BUSY_TEXT = 7_000_000  # bytes that keep a tokeniser thread busy for seconds, where it takes them


async def unread_log(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """A log at level debug, to a pipe that nobody reads."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        reader, writer = os.pipe()
        router = start_router(programs, Path(name), ["--log-level=trace"], stderr=writer)
        os.close(writer)
        workers = start_workers(programs, router, doc)
        try:
            await until_ready(router)
            body = {"model": "mock", "prompt": "hello", "max_tokens": 4}
            replies: list[Reply] = []
            for _ in range(scale.of(30)):
                batch = (ask(router, "/v1/completions", body, patience_s=5) for _ in range(20))
                replies += await asyncio.gather(*batch)
                if replies[-1].status != "200":
                    break
            health = await asyncio.to_thread(status_of, router, "/health")
            took = await asyncio.to_thread(router.end)
        finally:
            router.close()
            workers.terminate()
            workers.wait(10)
            os.close(reader)
    ended = "never" if took is None else f"{took:.1f} s"
    held = all(reply.status == "200" for reply in replies) and health == "200" and took is not None
    return Outcome(f"{tally(replies)}; /health {health}; SIGTERM to end {ended}", held)


async def full_log(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """A log on a full disk."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        full = os.open("/dev/full", os.O_WRONLY)
        router = start_router(programs, Path(name), ["--log-level=debug"], stderr=full)
        os.close(full)
        workers = start_workers(programs, router, doc)
        try:
            await until_ready(router)
            body = {"model": "mock", "prompt": "hello", "max_tokens": 4}
            replies = [await ask(router, "/v1/completions", body, patience_s=5) for _ in range(20)]
            took = await asyncio.to_thread(router.end)
        finally:
            router.close()
            workers.terminate()
            workers.wait(10)
    ended = "never" if took is None else f"{took:.1f} s"
    return Outcome(
        f"{tally(replies)}; SIGTERM to end {ended}",
        took is not None and replies[-1].status == "200",
    )


async def second_signal(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """SIGTERM twice while texts are tokenised that take seconds."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        router = start_router(programs, Path(name), ["--max-body-bytes=67108864"])
        workers = start_workers(programs, router, doc)
        try:
            await until_ready(router)
            text = "1234567890" * (scale.of(BUSY_TEXT) // 10)
            body = json.dumps({"model": "mock", "prompt": text}).encode()
            tasks = [
                asyncio.create_task(send(router, post(router, "/tokenize", body))) for _ in range(8)
            ]
            await asyncio.sleep(1.0)
            began = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            router.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(router.process.wait, 120)
                took = time.monotonic() - began
            except subprocess.TimeoutExpired:
                took = 120.0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            router.close()
            workers.terminate()
            workers.wait(10)
    return Outcome(f"ended after {took:.1f} s", took < 5)


async def open_doors(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """All addresses, without a key or a secret; keys that every user of the machine can read."""
    commands = {
        "--host 0.0.0.0": ["--host=0.0.0.0"],
        "--worker-listen 0.0.0.0:0": ["--worker-listen=0.0.0.0:0"],
        "--api-key on the command line": ["--api-key=secret-of-everybody"],
    }
    said: list[str] = []
    for what, flags in commands.items():
        with tempfile.TemporaryDirectory(prefix="attack-") as name:
            try:
                router = start_router(programs, Path(name), flags)
            except RuntimeError:
                continue
            said.append(f"{what} is taken")
            router.end()
    return Outcome(", ".join(said) or "all refused", not said)


TRIALS = [
    Trial(name="a log that nobody reads", run=unread_log),
    Trial(name="a log on a full disk", run=full_log),
    Trial(name="SIGTERM twice while texts are tokenised", run=second_signal),
    Trial(name="all addresses without key or secret, keys in arguments", run=open_doors),
]

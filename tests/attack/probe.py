"""Everybody else: paced streams and short requests beside an attack. A process of its own, so that nothing but the
router and the machine slows it down.

    python -m attack.probe HOST:PORT MODEL

runs until its standard input ends and then prints what it saw as JSON. Each line of its input is the name of a tenant,
as whom it asks once and prints the answer as a line: an attacker has too little of a busy machine to time a newcomer.
Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field

from attack.wire import Reply, ask

STREAMS = 16
STREAM_TOKENS = 2_000
SHORT_EVERY_S = 0.1
SHORT_AT_ONCE = 64  # more of them wait for a first token than a router that works ever has
NEWCOMERS_PATIENCE_S = 30.0


@dataclass(slots=True)
class Seen:
    """What the probe saw, each with its time."""

    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # end, ms
    # Start, ms.
    firsts: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    failures: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    skipped: int = 0  # short requests that were not begun, as too many waited


class Probe:
    """Streams that go on for ever, and a short request every tenth of a second."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self.host, self.port, self.model = host, port, model
        self.seen = Seen()
        self._number = 0

    def request(self, tokens: int) -> bytes:
        self._number += 1
        body = json.dumps(
            {
                "model": self.model,
                "prompt": f"probe {self._number}",
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return (head + body).encode()

    async def events(self, tokens: int) -> int:
        """One request; the number of its events. Notes when each came."""
        began = last = time.monotonic()
        count, ended = 0, False
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self.request(tokens))
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:16]:
                raise OSError(head.split(b"\r\n")[0].decode(errors="replace"))
            async for line in reader:
                if not line.startswith(b"data: {"):
                    ended = ended or line.startswith(b"data: [DONE]")
                    continue
                now = time.monotonic()
                if count == 0:
                    self.seen.firsts.append((began, (now - began) * 1e3))
                else:
                    self.seen.gaps.append((now, (now - last) * 1e3))
                count, last = count + 1, now
            if not ended:
                raise OSError("a stream ended without [DONE]")
            return count
        except asyncio.CancelledError:  # what it still waited for took at least this long
            now = time.monotonic()
            if count == 0:
                self.seen.firsts.append((began, (now - began) * 1e3))
            else:
                self.seen.gaps.append((now, (now - last) * 1e3))
            raise
        finally:
            writer.close()

    async def guarded(self, tokens: int) -> None:
        began = time.monotonic()
        try:
            await self.events(tokens)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.seen.failures.append((began, f"{type(error).__name__}: {error}"))
            await asyncio.sleep(SHORT_EVERY_S)

    async def stream_on(self) -> None:
        while True:
            await self.guarded(STREAM_TOKENS)

    async def ask_on(self) -> None:
        waiting: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(SHORT_EVERY_S)
            if len(waiting) >= SHORT_AT_ONCE:
                self.seen.skipped += 1
                continue
            task = asyncio.create_task(self.guarded(1))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

    async def newcomer(self, tenant: str) -> tuple[Reply, float]:
        """A short request on a connection of its own, and its seconds."""
        began = time.monotonic()
        reply = await ask(
            self,
            "/v1/completions",
            {"model": self.model, "prompt": "hello", "max_tokens": 1},
            [("X-Headrace-Tenant", tenant)],
            NEWCOMERS_PATIENCE_S,
        )
        return reply, time.monotonic() - began

    async def run(self) -> Seen:
        """Until standard input ends."""
        tasks = [asyncio.create_task(self.stream_on()) for _ in range(STREAMS)]
        tasks.append(asyncio.create_task(self.ask_on()))
        while tenant := (await asyncio.to_thread(sys.stdin.readline)).strip():
            reply, took = await self.newcomer(tenant)
            print(json.dumps([reply.status, reply.body.decode(errors="replace"), took]), flush=True)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        return self.seen


def main() -> None:
    host, port = sys.argv[1].rsplit(":", 1)
    seen = asyncio.run(Probe(host, int(port), sys.argv[2]).run())
    json.dump(asdict(seen), sys.stdout)


if __name__ == "__main__":
    main()

"""The loads: what each asks of a router, and how many descriptors that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Connections, listening sockets, logs and the like of a process, beside those of streams.
OTHER_DESCRIPTORS = 150
PREFIXES = 64  # beginnings of prompts that are asked for
CACHED_PREFIXES = 40  # of those, how many a worker has room for
STALLED_TOKENS = 256
TOKEN_TEXT = " water"  # of all tokens of `bench http-worker`
REQUESTS_OF_A_CLIENT = (
    1_000_000  # more than it sends in a run: numbers of requests begin so far apart
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load. `streams` clients have one request each at a time."""

    name: str
    what: str
    streams: int
    max_tokens: int
    step_ms: float = 0.0  # of the workers: a token of each stream takes so long
    requests: int = 0  # 0: as many as fit into the time of a run
    unary: bool = False
    words: int = 32  # of a prompt, beside those that prompts share
    shared: int = 0
    prefix_policy: bool = False  # routers choose by what workers have cached
    prefill_us: float = 0.0  # for each token of a prompt that its worker has not cached
    stalled: int = 0  # streams that nobody reads, beside the load
    paced: bool = False  # tokens are held against the workers' pace

    def flags(self, seconds: float) -> list[str]:
        """Of `bench load`."""
        flags = ["-c", str(self.streams), "--max-tokens", str(self.max_tokens), "--chat"]
        flags += ["--prompt-words", str(self.words)]
        if self.shared:
            flags += ["--shared-prefix", str(self.shared), "--prefixes", str(PREFIXES)]
        if self.unary:
            flags.append("--unary")
        if self.paced:
            flags += ["--pace", f"{self.step_ms}ms", "--token-text", TOKEN_TEXT]
        if self.requests:
            return [*flags, "-n", str(self.requests)]
        return [*flags, "--duration", f"{seconds}s"]

    @property
    def open_streams(self) -> int:
        """That are there at once."""
        return self.streams + self.stalled

    def descriptors(self, connections: int) -> int:
        """Of a process that has so many connections for each stream."""
        return connections * self.open_streams + OTHER_DESCRIPTORS

    def processes(self, limit: int) -> int:
        """That share the streams, with a connection for each, where a process may have so many descriptors."""
        return math.ceil(self.streams / max(1, limit - OTHER_DESCRIPTORS))

    def parts(self, count: int) -> list[Case]:
        """The load of each of so many processes; no part is greater than the first."""
        if count == 1:
            return [self]
        shares = zip(share(self.streams, count), share(self.requests, count), strict=True)
        return [replace(self, streams=streams, requests=requests) for streams, requests in shares]


def share(total: int, count: int) -> list[int]:
    """Parts that differ by one at most, the greater ones first."""
    return [total // count + (i < total % count) for i in range(count)]


def at_pace(streams: int, waves: int) -> Case:
    """128 tokens at 20 ms each."""
    return Case(
        name=f"C{streams}",
        what=f"{streams:,} streams of 128 tokens, a token each 20 ms",
        streams=streams,
        max_tokens=128,
        step_ms=20.0,
        requests=waves * streams,
        paced=True,
    )


def long_prompts(name: str, words: int, streams: int) -> Case:
    """Prompts of which all but 500 words are shared, inside their one message."""
    return Case(
        name=name,
        what=f"prompts of {words:,} words, all but 500 shared with others, one token",
        streams=streams,
        max_tokens=1,
        unary=True,
        words=500,
        shared=words - 500,
        prefix_policy=True,
        prefill_us=1.0,
    )


CASES = [
    Case(
        name="A",
        what="short chats, one token, 64 clients",
        streams=64,
        max_tokens=1,
        unary=True,
    ),
    Case(
        name="B",
        what="64 streams of 64 tokens, so fast that each token still is an event of its own: 4 ms",
        streams=64,
        max_tokens=64,
        step_ms=4.0,
    ),
    Case(
        name="B0",
        what="64 streams of 64 tokens, workers as fast as they go",
        streams=64,
        max_tokens=64,
    ),
    at_pace(512, waves=3),
    at_pace(2048, waves=2),
    at_pace(9_900, waves=1),
    at_pace(19_500, waves=1),
    at_pace(30_000, waves=1),
    long_prompts("D8k", 8_000, streams=16),
    long_prompts("D100k", 100_000, streams=4),
    Case(
        name="E",
        what=f"one client beside 9,900 streams of {STALLED_TOKENS} tokens that nobody reads",
        streams=1,
        max_tokens=32,
        step_ms=20.0,
        stalled=9_900,
    ),
    Case(
        name="F",
        what="one client alone, 32 tokens, a token each 5 ms",
        streams=1,
        max_tokens=32,
        step_ms=5.0,
    ),
]

# Of `--dry`: that everything works, in seconds.
DRY_CASES = [
    Case(name="A", what="short chats", streams=4, max_tokens=1, requests=40, unary=True),
    Case(name="B", what="streams", streams=4, max_tokens=8, step_ms=1.0, requests=12, paced=True),
    Case(
        name="D",
        what="shared beginnings",
        streams=2,
        max_tokens=1,
        requests=12,
        unary=True,
        words=20,
        shared=80,
        prefix_policy=True,
        prefill_us=1.0,
    ),
    Case(
        name="E",
        what="stalled readers",
        streams=1,
        max_tokens=4,
        step_ms=1.0,
        requests=3,
        stalled=3,
    ),
]

"""A router on a Unix socket that does what a test says, with the real frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from headrace.wire import codec
from headrace.wire.frames import (
    PROTOCOL,
    Blocks,
    Failed,
    Frame,
    Freed,
    FromRouter,
    Hello,
    KvReady,
    Snapshot,
    Step,
    TokenLogprob,
    Transferred,
    Welcome,
)

TIMEOUT_S = 20.0
F = TypeVar("F", bound=Frame)


@dataclass
class Answer:
    """What a router heard about one request."""

    ids: list[int] = field(default_factory=list[int])
    finish: str | None = None
    cached_tokens: int | None = None
    failed: Failed | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    freed: int | None = None
    ready: KvReady | None = None
    transferred: list[Transferred] = field(default_factory=list[Transferred])


class Conversation:
    """One worker's link, seen from the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.answers: dict[int, Answer] = {}
        self.cache: set[int] = set()  # block keys, kept up as a router does it
        self.sequence: int | None = None
        self.seen: deque[Frame] = deque(maxlen=1000)
        self.steps: list[Step] = []
        self.hello: Hello | None = None

    def answer(self, request: int) -> Answer:
        return self.answers.setdefault(request, Answer())

    def send(self, *messages: FromRouter) -> None:
        for message in messages:
            body = codec.encode(message)
            self._writer.write(len(body).to_bytes(4, "little") + body)

    def send_garbage(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> Frame:
        """The next frame. Raises EOFError when the worker hung up."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                frame = codec.decode(await self._reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise EOFError from error
        self._note(frame)
        return frame

    def _note(self, frame: Frame) -> None:
        self.seen.append(frame)
        match frame:
            case Step():
                self.steps.append(frame)
                for output in frame.outputs:
                    answer = self.answer(output.request)
                    assert answer.finish is None, "an output after the last one"
                    assert answer.freed is None, "an output after Freed"
                    answer.ids += output.ids
                    answer.logprobs += output.logprobs or []
                    answer.finish = output.finish
                    if output.cached_tokens is not None:
                        answer.cached_tokens = output.cached_tokens
            case Failed():
                self.answer(frame.request).failed = frame
            case Freed():
                answer = self.answer(frame.request)
                answer.freed = (answer.freed or 0) + frame.blocks
            case Snapshot():
                if self.sequence is None or frame.sequence != self.sequence:
                    self.cache.clear()
                self.sequence = frame.sequence
                self.cache |= keys(frame.hashes)
            case Blocks():
                assert self.sequence is not None, "a delta before the snapshot"
                assert frame.sequence == self.sequence + 1
                self.sequence = frame.sequence
                if frame.cleared:
                    self.cache.clear()
                self.cache -= keys(frame.removed)
                for run in frame.stored:
                    assert run.parent is None or run.parent in self.cache, "a child came first"
                    self.cache |= keys(run.hashes)
            case KvReady():
                answer = self.answer(frame.request)
                assert answer.ready is None, "a second ticket"
                assert answer.freed is None, "a ticket after Freed"
                answer.ready = frame
            case Transferred():
                self.answer(frame.request).transferred.append(frame)
            case _:
                pass

    async def until(self, done: Callable[[], bool]) -> None:
        """Receive until `done`."""
        async with asyncio.timeout(TIMEOUT_S):
            while not done():
                await self.receive()

    async def until_freed(self, *requests: int) -> None:
        await self.until(lambda: all(self.answer(r).freed is not None for r in requests))

    async def until_frame(self, kind: type[F]) -> F:
        while True:
            frame = await self.receive()
            if isinstance(frame, kind):
                return frame

    async def until_closed(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                await self.receive()

    def hang_up(self) -> None:
        self._writer.transport.abort()


class FakeRouter:
    """Accepts workers at `path`; `async with` listens."""

    def __init__(
        self,
        path: Path,
        *,
        hash_key: bytes = bytes(32),
        heartbeat_ms: int = 60_000,
        name: str = "fake",
    ) -> None:
        self.path = path
        self.address = f"unix:{path}"
        self._welcome = Welcome(
            protocol=PROTOCOL,
            router=name,
            heartbeat_ms=heartbeat_ms,
            challenge=b"",
            proof=b"",
            hash_key=hash_key,
        )
        self._accepted: asyncio.Queue[Conversation] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._conversations: list[Conversation] = []
        self.hello: Hello | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up_all()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversation = Conversation(reader, writer)
        self._conversations.append(conversation)
        self._accepted.put_nowait(conversation)

    def hang_up_all(self) -> None:
        for conversation in self._conversations:
            conversation.hang_up()

    async def accepted(self) -> Conversation:
        """The next worker that dials in, without an answer yet."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._accepted.get()

    async def worker(self, *, hash_key: bytes | None = None) -> Conversation:
        """The next worker that dials in, welcomed."""
        conversation = await self.accepted()
        hello = await conversation.receive()
        assert isinstance(hello, Hello)
        self.hello = conversation.hello = hello
        welcome = self._welcome
        if hash_key is not None:
            welcome = Welcome(
                welcome.protocol, welcome.router, welcome.heartbeat_ms, b"", b"", hash_key
            )
        conversation.send(welcome)
        return conversation


def keys(packed: bytes) -> set[int]:
    assert len(packed) % 8 == 0
    return {int.from_bytes(packed[i : i + 8], "little") for i in range(0, len(packed), 8)}

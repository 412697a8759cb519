"""Clients: one connection for each request, the stream parsed as it comes, and what is left of it to compare."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.load import Request

LONGEST_S = 120.0  # a request that takes longer hangs


@dataclass(slots=True)
class Choice:
    """What came of one choice so far."""

    text: list[str] = field(default_factory=list[str])
    logprobs: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    finish: str | None = None
    last_s: float = 0.0  # when the latest part came


@dataclass(frozen=True, slots=True)
class Answer:
    """All that must be equal, however the request was served. `cached_tokens` may differ and is left out."""

    choices: tuple[
        tuple[str, str, str | None], ...
    ]  # text, log-probabilities as JSON, finish reason
    usage: tuple[tuple[str, int], ...]


class Failed(Exception):
    """The answer is none: an error, or an end without `[DONE]`."""


class Stream(asyncio.Protocol):
    """One request in flight. `heard` is called after each event of the stream."""

    def __init__(self, request: Request, heard: Callable[[Stream], None] | None = None) -> None:
        self.request = request
        self.tokens = 0  # of all choices, as the running usage says
        self.choices = [Choice() for _ in range(request.choices)]
        self.began_s = time.monotonic()
        self.status = 0
        self.done = False  # `[DONE]` came
        self.hung_up = False
        self.usage: dict[str, Any] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = heard
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._body = bytearray()
        self._error = ""
        self._chunked = False

    # --- for its user ---

    def hang_up(self, *, reset: bool = False) -> None:
        """Go away. With `reset` the router gets a RST, otherwise a FIN."""
        self.hung_up = True
        if self._transport is not None:
            if reset:
                self._transport.abort()
            else:
                self._transport.close()

    def answer(self) -> Answer:
        """What to compare. Raises Failed."""
        if self.status != 200 or self._error or not self.done:
            what = self._error or bytes(self._body[-500:]).decode(errors="replace")
            raise Failed(f"status {self.status} after {self.tokens} tokens: {what or 'cut off'}")
        choices = tuple(
            ("".join(choice.text), json.dumps(choice.logprobs), choice.finish)
            for choice in self.choices
        )
        return Answer(choices, counts(self.usage))

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.status == 0:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            self.status = int(head.split(b" ", 2)[1])
            self._chunked = b"transfer-encoding: chunked" in head.lower()
            self._buffer = bytearray(rest)
        if self._chunked:
            self._unchunk()
        else:
            self._body += self._buffer
            self._buffer.clear()
        if self.status == 200:
            *lines, rest = self._body.split(b"\n")
            self._body = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(bytes(line[5:].strip()))

    def _unchunk(self) -> None:
        while True:
            size, separator, rest = self._buffer.partition(b"\r\n")
            if not separator:
                return
            count = int(size, 16)
            if len(rest) < count + 2:
                return
            self._body += rest[:count]
            self._buffer = rest[count + 2 :]
            if count == 0:
                return

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._error = json.dumps(event["error"])
            return
        now_s = time.monotonic()
        if usage := event.get("usage"):
            self.usage = usage
            self.tokens = usage["completion_tokens"]
        for part in event["choices"]:
            choice = self.choices[part["index"]]
            delta = part.get("delta")
            choice.text.append(part["text"] if delta is None else delta.get("content") or "")
            for name, values in (part.get("logprobs") or {}).items():
                choice.logprobs.setdefault(name, []).extend(values or [])
            choice.finish = part["finish_reason"] or choice.finish
            choice.last_s = now_s
        if self._heard is not None:
            self._heard(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():
            self.ended.set_result(None)


def counts(usage: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return tuple((name, usage.get(name, -1)) for name in names)


async def send(
    port: int, request: Request, model: str, heard: Callable[[Stream], None] | None = None
) -> Stream:
    """Connect and write the request; the stream ends on its own."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = json.dumps(
        {**request.body, "model": model, "stream": True, "stream_options": options}
    ).encode()
    head = (
        f"POST {request.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(
        lambda: Stream(request, heard), "127.0.0.1", port
    )
    transport.write(head.encode() + body)
    return stream


async def call(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """The body of the router's answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in answer.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        return await reader.readexactly(length)
    finally:
        writer.close()

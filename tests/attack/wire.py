"""Requests by hand: bytes on a socket, HTTP/1.1 or HTTP/2, and what came back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

PATIENCE_S = 60.0  # whoever waits longer for an answer calls it a hang


class Addressed(Protocol):
    """Where requests go: a router, or what stands in its place."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` is a number, or a word for an end without one."""

    status: str
    body: bytes = b""

    @property
    def error(self) -> str:
        """Code of the error, in the words of the router."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(self.body)["error"]["code"])
        return ""


def post(
    router: Addressed, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    """A whole request, as bytes."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {router.host}:{router.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(router: Addressed, path: str, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """A whole GET, as bytes."""
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {router.host}:{router.port}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def send(router: Addressed, request: bytes, patience_s: float = PATIENCE_S) -> Reply:
    """The answer to bytes, up to the end of the connection."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(router.host, router.port)
            try:
                with contextlib.suppress(ConnectionError):
                    writer.write(request)
                    await writer.drain()
                return parse(await everything(reader))
            finally:
                writer.close()
    except TimeoutError:
        return Reply("no answer")
    except OSError as error:
        return Reply(type(error).__name__)


async def everything(reader: asyncio.StreamReader) -> bytes:
    """All bytes up to the end, also where that is a reset."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 20):
            parts.append(part)
    return b"".join(parts)


def parse(answer: bytes) -> Reply:
    """Status and body of a whole HTTP/1.1 answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):  # an interim answer
        head, _, body = body.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return Reply("closed" if not answer else "not HTTP", answer)
    if b"transfer-encoding: chunked" in head.lower():
        body = unchunked(body)
    return Reply(words[1].decode(errors="replace"), body)


def unchunked(body: bytes) -> bytes:
    """The body without chunk lengths. It may have hundreds of megabytes, so no rest of it is copied."""
    parts: list[bytes] = []
    at = 0
    while (end := body.find(b"\r\n", at)) >= 0:
        try:
            length = int(body[at:end].split(b";")[0], 16)
        except ValueError:
            break
        if length == 0:
            break
        parts.append(body[end + 2 : end + 2 + length])
        at = end + 2 + length + 2
    return b"".join(parts)


async def ask(
    router: Addressed,
    path: str,
    body: Any,
    headers: Iterable[tuple[str, str]] = (),
    patience_s: float = PATIENCE_S,
) -> Reply:
    """A JSON request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(router, post(router, path, data, headers), patience_s)


def tally(replies: Iterable[Reply]) -> str:
    """Statuses with their numbers and errors, most frequent first."""
    words = Counter(f"{reply.status} {reply.error}".strip() for reply in replies)
    return ", ".join(
        word if count == 1 else f"{count} x {word}" for word, count in words.most_common()
    )


# --- HTTP/2, as little as the attacks need ---

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x8
CANCEL = 0x8
END_STREAM, END_HEADERS = 0x1, 0x4
INITIAL_WINDOW_SIZE = 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of RFC 9113."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def reset(stream: int) -> bytes:
    """The client wants no answer any more."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def greeting(window: int) -> bytes:
    """Preface and settings of a client whose streams may be sent `window` bytes each."""
    return PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))


def literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman coding (RFC 7541, 6.2.2)."""

    def text(word: str) -> bytes:
        data = word.encode()
        assert len(data) < 127
        return bytes([len(data)]) + data

    return b"\x00" + text(name) + text(value)


def h2_request(
    router: Addressed, stream: int, method: str, path: str, body: bytes = b"", tenant: str = ""
) -> bytes:
    """HEADERS, and DATA where there is a body."""
    fields = [
        (":method", method),
        (":scheme", "http"),
        (":path", path),
        (":authority", f"{router.host}:{router.port}"),
    ]
    if body:
        fields.append(("content-type", "application/json"))
    if tenant:
        fields.append(("x-headrace-tenant", tenant))
    block = b"".join(literal(name, value) for name, value in fields)
    flags = END_HEADERS | (0 if body else END_STREAM)
    head = frame(HEADERS, flags, stream, block)
    return head + (frame(DATA, END_STREAM, stream, body) if body else b"")

"""The little of etcd that workers need: read a prefix and watch it, over its JSON gateway (`/v3/...`, plain HTTP).

One connection for each call, closed after it: a watch is a call whose answer does not end.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, cast

CALL_S = 5.0  # for the dial, and for a whole answer
MAX_HEAD_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 4 << 20  # one answer, or one message of a watch


class EtcdError(OSError):
    """An etcd answered, and not with what was asked for."""


class Compacted(EtcdError):
    """The history that a watch should begin with is gone: read again."""


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    """A key and its value; `value` is None where the key went."""

    key: bytes
    value: bytes | None


class Etcd:
    """One endpoint. All calls raise OSError: unreachable, late, broken off, or EtcdError."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def read(self, prefix: bytes, limit: int) -> tuple[list[EtcdEntry], int]:
        """At most `limit` entries, and the revision that they are of."""
        body = _range(prefix) | {"limit": limit}
        async with asyncio.timeout(CALL_S), _connection(self._host, self._port) as connection:
            await connection.post("/v3/kv/range", body)
            answer = await connection.whole()
        return [_entry(kv) for kv in _list(answer, "kvs")], _revision(answer)

    async def watch(self, prefix: bytes, revision: int) -> AsyncGenerator[list[EtcdEntry]]:
        """What changes from `revision` on. The first item, empty, says that the watch stands. Ends only by raising."""
        body = {"create_request": _range(prefix) | {"start_revision": revision}}
        async with _connection(self._host, self._port) as connection:
            async with asyncio.timeout(CALL_S):
                await connection.post("/v3/watch", body)
            async for message in connection.messages():
                result = message.get("result")
                if not isinstance(result, dict):
                    raise EtcdError(f"the watch ended: {json.dumps(message)[:200]}")
                result = cast(dict[str, Any], result)
                if "compact_revision" in result:
                    raise Compacted("the history of this prefix was compacted")
                if result.get("canceled"):
                    raise EtcdError(f"the watch was cancelled: {result.get('cancel_reason')}")
                yield [_changed(event) for event in _list(result, "events")]
        raise EtcdError("the watch ended")


class _Connection:
    """One request over HTTP/1.1 and its answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._chunked = False
        self._length: int | None = None

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request and read the head of its answer."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        await self._writer.drain()
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = lines[0].split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1."):
            raise EtcdError(f"no HTTP answer: {lines[0][:100]!r}")
        for line in lines[1:]:
            name, _, value = line.partition(":")
            match name.strip().lower(), value.strip().lower():
                case "transfer-encoding", "chunked":
                    self._chunked = True
                case "content-length", length if length.isascii() and length.isdigit():
                    self._length = int(length)
                case _:
                    pass
        if status[1] != "200":
            text = b""
            with contextlib.suppress(EtcdError):  # the status says enough
                text = await self._body()
            raise EtcdError(f"status {status[1]}: {text[:200].decode(errors='replace')}")

    async def whole(self) -> dict[str, Any]:
        return _object(await self._body())

    async def messages(self) -> AsyncGenerator[dict[str, Any]]:
        """One for each line of a body that goes on."""
        rest = b""
        async for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                if line.strip():
                    yield _object(line)
            if len(rest) > MAX_MESSAGE_BYTES:
                raise EtcdError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")

    async def _body(self) -> bytes:
        body = b""
        async for piece in self._pieces():
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:
                raise EtcdError(f"an answer of more than {MAX_MESSAGE_BYTES} bytes")
        return body

    async def _pieces(self) -> AsyncGenerator[bytes]:
        if self._chunked:
            while True:
                size = (await self._until(b"\r\n")).split(b";")[0].strip()
                try:
                    length = int(size, 16)
                except ValueError:
                    raise EtcdError(f"no chunk begins with {size[:20]!r}") from None
                if not 0 <= length <= MAX_MESSAGE_BYTES:
                    raise EtcdError(f"a chunk of {length} bytes")
                if length == 0:
                    return
                yield (await self._exactly(length + 2))[:length]
        elif self._length is not None:
            if self._length > MAX_MESSAGE_BYTES:
                raise EtcdError(f"an answer of {self._length} bytes")
            yield await self._exactly(self._length)
        else:
            while piece := await self._reader.read(64 << 10):
                yield piece

    async def _until(self, end: bytes) -> bytes:
        try:
            return await self._reader.readuntil(end)
        except asyncio.IncompleteReadError:
            raise EtcdError("it hung up") from None
        except asyncio.LimitOverrunError:
            raise EtcdError("a head or a line without end") from None

    async def _exactly(self, n: int) -> bytes:
        try:
            return await self._reader.readexactly(n)
        except asyncio.IncompleteReadError:
            raise EtcdError("it hung up") from None


@contextlib.asynccontextmanager
async def _connection(host: str, port: int) -> AsyncGenerator[_Connection]:
    async with asyncio.timeout(CALL_S):
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
    try:
        yield _Connection(reader, writer, host)
    finally:
        writer.transport.abort()


def _range(prefix: bytes) -> dict[str, Any]:
    """All keys that begin with `prefix`, which does not end in 0xff."""
    end = prefix[:-1] + bytes([prefix[-1] + 1])
    return {"key": base64.b64encode(prefix).decode(), "range_end": base64.b64encode(end).decode()}


def _entry(kv: dict[str, Any]) -> EtcdEntry:
    return EtcdEntry(_bytes(kv, "key"), _bytes(kv, "value"))


def _changed(event: dict[str, Any]) -> EtcdEntry:
    """A put has no type: it is the default of the enum, which the gateway leaves out."""
    kv = event.get("kv")
    if not isinstance(kv, dict):
        raise EtcdError("an event without a key")
    kv = cast(dict[str, Any], kv)
    return EtcdEntry(_bytes(kv, "key"), None) if event.get("type") == "DELETE" else _entry(kv)


def _bytes(kv: dict[str, Any], name: str) -> bytes:
    text = kv.get(name, "")  # an empty one is left out
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise EtcdError(f"{name} is no base64") from None


def _revision(answer: dict[str, Any]) -> int:
    header = answer.get("header")
    try:
        return int(cast(dict[str, Any], header)["revision"])
    except (TypeError, KeyError, ValueError):
        raise EtcdError("an answer without a revision") from None


def _list(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: Any = answer.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise EtcdError(f"{name} is no list")
    return cast(list[dict[str, Any]], found)


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise EtcdError(f"no JSON: {data[:100]!r}") from None
    if not isinstance(found, dict):
        raise EtcdError("the answer is no JSON object")
    return cast(dict[str, Any], found)

"""An etcd prefix as workers follow it: against a real etcd, and against what is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import pytest

from headrace.wire import discovery
from headrace.wire.discovery import EtcdPrefix, parse_sources
from headrace.wire.etcd import Etcd, EtcdError
from headrace.wire.link import parse_address
from helpers.etcd import EtcdServer, free_ports

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(discovery, "LONGEST_RETRY_S", 0.1)


def entry(address: str) -> bytes:
    return json.dumps({"address": address, "router": "r"}).encode()


class Known:
    """What a source knows, each time it says so."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[set[str]] = asyncio.Queue()

    async def until(self, *texts: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while await self._told.get() != set(texts):
                pass

    @contextlib.asynccontextmanager
    async def of(self, source: discovery.RouterSource) -> AsyncGenerator[None]:
        def report(addresses: object) -> None:
            self._told.put_nowait({address.text for address in addresses})  # type: ignore[attr-defined]

        task = asyncio.create_task(source.run(report))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def follow(*endpoints: str) -> discovery.RouterSource:
    (source,) = parse_sources([f"etcd:{','.join(endpoints)}/head/race"])
    return source


async def call(function: object, *arguments: object) -> None:
    await asyncio.to_thread(function, *arguments)  # type: ignore[arg-type]


async def test_routers_come_and_go(etcd: EtcdServer) -> None:
    known = Known()
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    await call(etcd.put, b"head/races/z", entry("10.0.0.9:9"))  # another prefix
    async with known.of(follow(etcd.endpoint)):
        await known.until("10.0.0.1:1")
        await call(etcd.put, b"head/race/b", entry("10.0.0.2:2"))
        await known.until("10.0.0.1:1", "10.0.0.2:2")
        await call(etcd.delete, b"head/race/a")
        await known.until("10.0.0.2:2")
        await call(etcd.put, b"head/race/b", entry("10.0.0.3:3"))
        await known.until("10.0.0.3:3")


GARBAGE = [
    *(b"", b"\xff\xfe", b"10.0.0.1:1", b"[]", b"{}", b'{"address": 7}', b'{"address": ""}'),
    *(b'{"address": "unix:/etc/passwd"}', b'{"address": "a:0"}', b"[" * 100_000),
    json.dumps({"address": "h" * 1000 + ":1"}).encode(),
]


async def test_garbage_is_passed_over_by_name(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    known = Known()
    for number, garbage in enumerate(GARBAGE):
        await call(etcd.put, b"head/race/\x00\xff%d" % number, garbage)
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    async with known.of(follow(etcd.endpoint)):
        await known.until("10.0.0.1:1")
        for number, garbage in enumerate(GARBAGE):
            await call(etcd.put, b"head/race/later%d" % number, garbage)
        await call(etcd.put, b"head/race/b", entry("10.0.0.2:2"))
        await known.until("10.0.0.1:1", "10.0.0.2:2")
    named = [record for record in caplog.records if "discovery bad_entry" in record.getMessage()]
    assert len(named) == 2 * len(GARBAGE)


async def test_what_is_known_outlives_etcd(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    known = Known()
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    async with known.of(follow(etcd.endpoint)):
        await known.until("10.0.0.1:1")
        await call(etcd.kill)
        await call(etcd.start)
        await call(etcd.put, b"head/race/b", entry("10.0.0.2:2"))
        await known.until("10.0.0.1:1", "10.0.0.2:2")
        await call(etcd.kill)
        await call(etcd.wipe)  # a new etcd, with revisions from 1 on
        await call(etcd.start)
        await call(etcd.put, b"head/race/c", entry("10.0.0.3:3"))
        await known.until("10.0.0.3:3")
    assert "discovery etcd_failed" in caplog.text
    assert "the 1 routers known stay" in caplog.text


async def test_a_watch_that_is_silent_is_not_believed_for_ever(etcd: EtcdServer) -> None:
    known = Known()
    host, port = parse_address(etcd.endpoint)  # type: ignore[misc]
    source = EtcdPrefix([Etcd(host, port)], "head/race/", read_again_s=0.05)
    async with known.of(source):
        await known.until()
        await call(etcd.compact)
        await known.until()
        await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
        await known.until("10.0.0.1:1")


async def test_a_history_that_is_gone_is_read_anew(etcd: EtcdServer) -> None:
    for number in range(5):
        await call(etcd.put, b"head/race/a", entry(f"10.0.0.1:{number + 1}"))
    await call(etcd.compact)
    host, port = parse_address(etcd.endpoint)  # type: ignore[misc]
    with pytest.raises(EtcdError, match="compacted"):
        async for _ in Etcd(host, port).watch(b"head/race/", 1):
            pass


async def test_another_member_is_asked_where_one_is_gone(etcd: EtcdServer) -> None:
    known = Known()
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    async with known.of(follow(f"127.0.0.1:{free_ports(1)[0]}", etcd.endpoint)):
        await known.until("10.0.0.1:1")


ANSWERS = [
    *(b"", b"HTTP/1.1", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 200_000),
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\noops",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
    b'HTTP/1.1 200 OK\r\n\r\n{"header": {"revision": "x"}}',
    b'HTTP/1.1 200 OK\r\n\r\n{"header": {"revision": "1"}, "kvs": 7}',
    b'HTTP/1.1 200 OK\r\n\r\n{"header": {"revision": "1"}, "kvs": [7]}',
    b'HTTP/1.1 200 OK\r\n\r\n{"header": {"revision": "1"}, "kvs": [{"key": 7}]}',
    b'HTTP/1.1 200 OK\r\n\r\n{"header": {"revision": "1"}, "kvs": [{"key": "?"}]}',
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
async def test_what_is_no_etcd_is_an_error_and_no_crash(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(OSError):  # noqa: PT011
            await Etcd("127.0.0.1", server.sockets[0].getsockname()[1]).read(b"head/", 10)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]\n", b'{"error": {"message": "no leader"}}\n', b'{"result": 7}\n'),
        b'{"result": {"canceled": true, "cancel_reason": "auth"}}\n',
        b'{"result": {"events": [{"type": "PUT"}]}}\n',
        b'{"result": {"compact_revision": "7", "canceled": true}}\n',
        b"x" * (5 << 20),
    ],
    ids=range(8),
)
async def test_a_watch_that_goes_wrong_is_an_error_and_no_crash(line: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"result": {"created": true}}\n' + line)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        etcd = Etcd("127.0.0.1", server.sockets[0].getsockname()[1])
        changes = etcd.watch(b"head/", 1)
        assert await anext(changes) == []
        with pytest.raises(EtcdError):
            await anext(changes)


async def test_a_dead_etcd_is_late_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wire.etcd.CALL_S", 0.05)
    hold = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(TimeoutError):
            await Etcd("127.0.0.1", server.sockets[0].getsockname()[1]).read(b"head/", 10)
        hold.set()

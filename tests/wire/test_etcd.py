"""An etcd prefix as workers follow it: against a real etcd, and against what is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from headrace.errors import ConfigError, EtcdCompacted, EtcdFailed
from headrace.wire import discovery
from headrace.wire.discovery import EtcdPrefix, parse_sources
from headrace.wire.etcd import EtcdClient
from helpers.ports import held_ports
from helpers.serving.etcd import CERT, DATA, KEY, EtcdServer, etcd_binary

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
    source = EtcdPrefix(EtcdClient([etcd.endpoint]), "head/race/", read_again_s=0.05)
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
    with pytest.raises(EtcdCompacted):
        async for _ in EtcdClient([etcd.endpoint]).watch(b"head/race/", 1):
            pass


async def test_another_member_is_asked_where_one_is_gone(etcd: EtcdServer) -> None:
    known = Known()
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    with held_ports(1) as [nobody]:
        async with known.of(follow(f"127.0.0.1:{nobody}", etcd.endpoint)):
            await known.until("10.0.0.1:1")


async def test_a_member_that_is_frozen_is_passed_over(etcd: EtcdServer, tmp_path: Path) -> None:
    frozen = EtcdServer(etcd_binary(), tmp_path / "frozen")
    frozen.start()
    try:
        client = EtcdClient([frozen.endpoint, etcd.endpoint])
        await client.read(b"head/", 10)  # so that there is a connection
        frozen.freeze()
        await call(etcd.put, b"head/race/a", b"there")
        entries, _ = await client.read(b"head/", 10)
        assert [entry.value for entry in entries] == [b"there"]
    finally:
        frozen.thaw()
        frozen.close()


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables that say how etcd is entered, by the ends of their names."""

    def set_variables(**variables: object) -> None:
        for name in ("CA", "CERT", "KEY", "USER", "PASSWORD"):
            monkeypatch.delenv(f"HEADRACE_ETCD_{name}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"HEADRACE_ETCD_{name}", str(value))

    set_variables()
    return set_variables


async def refusal(etcd: EtcdServer) -> str:
    """What a client is told that may not, or cannot, read."""
    with pytest.raises(EtcdFailed) as failed:
        await EtcdClient([etcd.endpoint]).read(b"head/race/", 10)
    return str(failed.value)


async def test_an_etcd_with_tls_is_entered_by_who_trusts_it_and_is_trusted(
    tmp_path: Path, enter: Callable[..., None]
) -> None:
    etcd = EtcdServer(etcd_binary(), tmp_path / "etcd", tls=True, known_clients=True)
    etcd.start()
    try:
        await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
        enter(CA=CERT, CERT=CERT, KEY=KEY)
        known = Known()
        async with known.of(follow(etcd.endpoint)):
            await known.until("10.0.0.1:1")
            await call(etcd.put, b"head/race/b", entry("10.0.0.2:2"))
            await known.until("10.0.0.1:1", "10.0.0.2:2")
        enter(CA=DATA / "stranger.crt", CERT=CERT, KEY=KEY)
        assert "TLS: " in await refusal(etcd)
        enter(CA=CERT)  # without a certificate of one's own, etcd hangs up
        told = await refusal(etcd)
        assert etcd.endpoint in told
        assert "--client-cert-auth" in told
        assert "set HEADRACE_ETCD_CERT and HEADRACE_ETCD_KEY" in told
        enter()
        assert etcd.endpoint in (told := await refusal(etcd))
        assert "client-cert-auth" not in told  # it is not TLS that was tried
    finally:
        etcd.close()


async def test_an_etcd_with_users_is_entered_by_those_with_a_password_and_a_role(
    etcd: EtcdServer, enter: Callable[..., None]
) -> None:
    await call(etcd.put, b"head/race/a", entry("10.0.0.1:1"))
    await call(etcd.require_login, "headrace", "open sesame", b"head/race/")
    enter(USER="headrace", PASSWORD="open sesame")
    known = Known()
    async with known.of(follow(etcd.endpoint)):
        await known.until("10.0.0.1:1")
        await call(etcd.put, b"head/race/b", entry("10.0.0.2:2"))
        await known.until("10.0.0.1:1", "10.0.0.2:2")
    with pytest.raises(EtcdFailed, match="permission denied"):
        await EtcdClient([etcd.endpoint]).read(b"other/", 10)
    enter(USER="headrace", PASSWORD="open barley")
    told = await refusal(etcd)
    assert "HEADRACE_ETCD_PASSWORD" in told
    assert "barley" not in told
    enter()
    assert "HEADRACE_ETCD_USER" in await refusal(etcd)


async def test_a_user_may_be_told_before_etcd_asks_for_one(
    etcd: EtcdServer, enter: Callable[..., None]
) -> None:
    enter(USER="headrace", PASSWORD="open sesame")
    await EtcdClient([etcd.endpoint]).read(b"head/race/", 10)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"CA": DATA / "none.crt"}, "HEADRACE_ETCD_CA: cannot read"),
        ({"CA": KEY}, "HEADRACE_ETCD_CA: .* holds no certificate"),
        ({"CERT": CERT, "KEY": KEY}, "HEADRACE_ETCD_CA: is missing"),
        ({"USER": "headrace"}, "HEADRACE_ETCD_PASSWORD: is missing"),
    ],
    ids=repr,
)
def test_variables_that_make_no_sense_are_refused_by_name(
    variables: dict[str, object], named: str, enter: Callable[..., None]
) -> None:
    enter(**variables)
    with pytest.raises(ConfigError, match=named):
        parse_sources(["etcd:127.0.0.1:2379/head/race"])


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"x" * 200_000],
    ids=range(4),
)
async def test_what_is_no_etcd_is_an_error_and_no_crash(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(3)
        with contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EtcdFailed):
            await EtcdClient([f"127.0.0.1:{port}"]).read(b"head/", 10)


async def test_a_watch_that_is_left_lets_its_thread_go(etcd: EtcdServer) -> None:
    client = EtcdClient([etcd.endpoint])
    changes = client.watch(b"head/", 1)
    assert await anext(changes) == []
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)  # it waits for a change
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await changes.aclose()
    # all threads are back, or this would wait for them
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.get_running_loop().shutdown_default_executor()

"""Connections that say nothing, or nothing right: they end soon, and nobody's pull is lost to them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from headrace.kv_transfer.backends.base import VERSION, LinkBroken, layout_text
from headrace.kv_transfer.peers import server as server_module
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.messages import Challenge, KvHello, KvOpen, KvRefuse, KvRefuseReason
from headrace.kv_transfer.peers.room import MAX_STRANGERS, STRANGERS_OF_ADDRESS
from headrace.kv_transfer.peers.server import TransferServer, peer_address
from headrace.kv_transfer.peers.stream import Stream
from helpers.kv.peers import (
    BACKENDS,
    HASTY,
    LAYOUT,
    MEMBERS,
    NONCE,
    PATIENT,
    Backend,
    connected,
    forever,
    greet,
    proven,
    serving_of,
    until,
)
from helpers.kv.pools import FakeSource, make_pool
from helpers.kv.pull_keys import PULL_KEY, bound

POOL = make_pool(seed=1)
serving = partial(serving_of, POOL)
SOURCE = FakeSource(blocks=(4, 5))
SILENT = 300


@asynccontextmanager
async def strangers(
    server: TransferServer, backend: Backend, count: int
) -> AsyncGenerator[list[Stream]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(connected(server.endpoints, backend))
            for _ in range(count)
        ]


async def a_pull(server: TransferServer, backend: Backend) -> None:
    client = TransferClient(
        make_pool(), LAYOUT, members=MEMBERS, backends=[backend], limits=PATIENT
    )
    ticket = server.offer(SOURCE, PULL_KEY, lambda: None)
    pulled = await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
    assert pulled.backend == backend
    await client.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_silent_connections_cost_nobody_a_pull(backend: Backend) -> None:
    """More of them than there may be connections, over a way that is in use and over the other one."""
    async with serving(PATIENT) as server, strangers(server, backend, SILENT):
        for _ in range(3):
            for way in BACKENDS:
                await a_pull(server, way)
        assert server.turned_away["evicted"] >= SILENT - STRANGERS_OF_ADDRESS
        assert server.clients <= MAX_STRANGERS


@pytest.mark.parametrize("backend", BACKENDS)
async def test_connections_that_greet_and_stop_there_cost_nobody_a_pull(backend: Backend) -> None:
    async with serving(PATIENT) as server, strangers(server, backend, 100) as streams:
        for stream in streams:
            with suppress(LinkBroken):  # it had to leave for a newer one
                await stream.send([KvHello(VERSION, NONCE)])
                assert isinstance(await stream.receive(), Challenge)
        for way in BACKENDS:
            await a_pull(server, way)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_silent_connections_end_by_themselves(backend: Backend) -> None:
    async with serving(HASTY) as server, strangers(server, backend, 20):
        await until(lambda: server.clients == 20)
        async with asyncio.timeout(60):
            await until(lambda: server.clients == 0)
        assert server.turned_away == {"late": 20}


async def trickle(stream: Stream) -> None:
    """A message of 1,000 bytes, so slowly that all of it would take 20 s."""
    for byte in (996).to_bytes(4, "little") + bytes(996):
        await stream._send_all([memoryview(bytes([byte]))])
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_trickle_of_bytes_buys_no_time(backend: Backend, greeted: bool) -> None:
    async with serving(HASTY) as server, connected(server.endpoints, backend) as stream:
        if greeted:
            await stream.send([KvHello(VERSION, NONCE)])
            assert isinstance(await stream.receive(), Challenge)
        async with asyncio.timeout(60):
            with pytest.raises(LinkBroken):
                await trickle(stream)
        assert server.turned_away == {"late": 1}


async def test_members_and_strangers_of_either_way_have_room_of_their_own() -> None:
    async with (
        serving(dataclasses.replace(PATIENT, max_links=1)) as server,
        connected(server.endpoints, "tcp") as by_tcp,
        connected(server.endpoints, "shm") as by_shm,
        strangers(server, "tcp", SILENT),
        connected(server.endpoints, "tcp") as one_more,
    ):
        ticket = server.offer(SOURCE, PULL_KEY, lambda: None)
        # the oldest of the strangers, so they were the first to leave
        for stream in (by_tcp, by_shm):
            stream.close("again")
        async with (
            connected(server.endpoints, "tcp") as by_tcp,
            connected(server.endpoints, "shm") as by_shm,
        ):
            await greet(by_tcp, POOL, "tcp", ticket)
            await greet(by_shm, POOL, "shm", ticket)
            open_ = KvOpen(layout_text(LAYOUT, POOL), ["tcp"])
            await one_more.send([await proven(one_more, ticket), open_])
            assert await one_more.receive() == KvRefuse(
                KvRefuseReason.LINKS, None, "1 at most", "one more"
            )
            async with strangers(server, "tcp", SILENT):
                pass
            assert by_tcp._broken is None  # strangers do not push members out


async def test_other_work_goes_on_between_two_of_a_flood() -> None:
    async with serving(PATIENT) as server:
        rest = next(e for e in server.endpoints if e.startswith("shm:")).partition(":")[2]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        knocking = [socket.socket(socket.AF_UNIX) for _ in range(50)]
        for sock in knocking:
            sock.connect(f"\0{rest}")  # before the server's loop can look
        counting = asyncio.create_task(count())
        await until(lambda: server.clients == 50)
        counting.cancel()
        assert turns >= 50
        for sock in knocking:
            sock.close()


async def test_where_descriptors_are_short_strangers_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 0)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, 3

    async def sock_accept(sock: socket.socket) -> Any:
        nonlocal failures
        accepted = await accept(sock)
        if sock.family != socket.AF_UNIX and failures:
            failures -= 1
            accepted[0].close()
            raise OSError(errno.EMFILE, "Too many open files")
        return accepted

    async with serving(PATIENT) as server, strangers(server, "tcp", 5) as streams:
        await until(lambda: server.clients == 5)
        loop.sock_accept = sock_accept  # type: ignore[method-assign]
        async with strangers(server, "tcp", 4):  # the listener waits in the old one once more
            await until(lambda: failures == 0)
        await until(lambda: server.turned_away["evicted"] == 3)
        for stream in streams[:3]:
            with pytest.raises(LinkBroken):
                await forever(stream)
        await a_pull(server, "tcp")


async def test_a_source_whose_backlog_is_full_is_dialled_until_there_is_room() -> None:
    """A Unix socket refuses at once then, which asyncio takes for a connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0headrace-test-full")
    listener.listen(0)
    listener.setblocking(False)
    first = socket.socket(socket.AF_UNIX)
    first.connect("\0headrace-test-full")
    client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=PATIENT)
    pull = asyncio.create_task(
        client.pull(["shm:headrace-test-full"], bound(bytes(24)), [(0, 0)], timeout_s=20)
    )
    loop = asyncio.get_running_loop()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not pull.done()
    (await loop.sock_accept(listener))[0].close()
    sock, _ = await loop.sock_accept(listener)
    assert isinstance(await Stream(sock).receive(), KvHello)
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    await client.close()
    for each in (listener, first, sock):
        each.close()


async def test_what_strangers_do_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(PATIENT) as server:
        for _ in range(50):
            async with connected(server.endpoints, "shm") as stream:
                await stream.send([KvHello(VERSION + 1, NONCE)])
                assert isinstance(await stream.receive(), KvRefuse)
        assert server.turned_away == {"version": 50}
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("family", "address", "expected"),
    [
        (socket.AF_INET, ("10.0.0.7", 1), "10.0.0.7"),
        (socket.AF_INET6, ("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (socket.AF_INET6, ("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (socket.AF_INET6, ("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
    ],
)
def test_whoever_has_a_network_of_ipv6_is_one_address(
    family: socket.AddressFamily, address: tuple[Any, ...], expected: str
) -> None:
    with socket.socket(family) as sock:
        assert peer_address(sock, address) == expected

"""Pulls by NIXL, on the memory of this machine. Skipped where NIXL is not installed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from headrace.kv_transfer.backends import endpoints
from headrace.kv_transfer.backends.base import TransferError
from headrace.kv_transfer.backends.nixl import find_nixl
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from headrace_kernels.ops import KvPool
from helpers.kv.peers import LAYOUT, MEMBERS, NOTICING, QUICK, until
from helpers.kv.pools import SHAPES, FakeSource, Shape, all_bytes, block_of, make_pool, memory_of
from helpers.kv.processes import line, process, tell
from helpers.kv.pull_keys import PULL_KEY, bound
from helpers.require import needs

needs_nixl = needs("nixl", "NIXL is not installed", here=find_nixl() is not None)


@asynccontextmanager
async def pair(
    theirs: KvPool, ours: KvPool
) -> AsyncGenerator[tuple[TransferServer, TransferClient]]:
    server = TransferServer(theirs, LAYOUT, members=MEMBERS, backends=["nixl", "tcp"], limits=QUICK)
    client = TransferClient(ours, LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    try:
        yield server, client
    finally:
        await client.close()
        await server.close()


@needs_nixl
@pytest.mark.parametrize("shape", SHAPES)
async def test_blocks_arrive_as_they_are_and_nothing_else_changes(shape: Shape) -> None:
    theirs, ours = make_pool(shape, seed=1), make_pool(shape, seed=2)
    expected = [block_of(ours, block) for block in range(ours.num_blocks)]
    source = FakeSource(blocks=(3, 4, 5, 11, 0))
    wanted = [(0, 9), (1, 10), (2, 11), (4, 2)]
    async with pair(theirs, ours) as (server, client):
        assert [endpoint.partition(":")[0] for endpoint in server.endpoints] == ["nixl", "tcp"]
        ticket = server.offer(source, PULL_KEY, source.on_released)
        pulled = await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
    assert (pulled.backend, pulled.bytes) == ("nixl", 4 * ours.block_bytes)
    assert source.released == 1
    for place, block in wanted:
        expected[block] = block_of(theirs, source.blocks[place])
    assert [block_of(ours, block) for block in range(ours.num_blocks)] == expected


@needs_nixl
async def test_many_pulls_at_once_and_segments_that_come_one_by_one() -> None:
    theirs, ours = make_pool(num_blocks=64, seed=1), make_pool(num_blocks=64)
    sources = [FakeSource(blocks=range(4 * n, 4 * n + 4), done=set()) for n in range(16)]
    async with pair(theirs, ours) as (server, client):
        pulls = [
            asyncio.create_task(
                client.pull(
                    server.endpoints,
                    bound(server.offer(source, PULL_KEY, source.on_released)),
                    [(place, source.blocks[place]) for place in range(4)],
                    timeout_s=20,
                )
            )
            for source in sources
        ]
        for group in range(3):
            for place in range(4):
                for source in sources:
                    assert source.done is not None
                    source.done.add((place, group))
                server.wake()
                await asyncio.sleep(0)
        await asyncio.gather(*pulls)
    assert all_bytes(ours) == all_bytes(theirs)


@needs_nixl
async def test_a_cancelled_pull_writes_nothing_more() -> None:
    theirs, ours = make_pool(seed=1, layer_bytes=1 << 20), make_pool(layer_bytes=1 << 20)
    source = FakeSource(blocks=range(16))
    memory = memory_of(ours)
    async with pair(theirs, ours) as (server, client):
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        wanted = [(n, n) for n in range(16)]
        pull = asyncio.create_task(
            client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
        )
        await until(lambda: memory[4096] == memory_of(theirs)[4096])  # it has begun
        pull.cancel()
        await asyncio.wait([pull])
        memory[:] = bytes(len(memory))
        await until(lambda: source.failed == 1)
        assert memory == bytes(len(memory))


@needs_nixl
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_is_killed_or_stopped_writes_nothing_more(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, where the source has to do something for each read: stopped and continued, it would go on with it."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    ours = make_pool(layer_bytes=1 << 20)
    memory = memory_of(ours)
    client = TransferClient(ours, LAYOUT, members=MEMBERS, backends=["nixl"], limits=NOTICING)
    async with process("source", "nixl", "5", str(1 << 20)) as source:
        ticket, endpoint = (await line(source)).split()
        wanted = [(n, n) for n in range(8)]
        pull = asyncio.create_task(
            client.pull([endpoint], bound(bytes.fromhex(ticket)), wanted, timeout_s=30)
        )
        assert await line(source) == "asked"
        tell(source, "all")
        await until(lambda: memory[1 << 20] != 0)
        source.send_signal(how)
        with pytest.raises(TransferError) as caught:
            await pull
        assert (caught.value.kind, caught.value.backend) == ("lost", "nixl")
        if how == signal.SIGSTOP:
            memory[:] = bytes(len(memory))
            source.send_signal(signal.SIGCONT)
            # or UCX ends it: "Fatal: unexpected error: Endpoint timeout" (see nixl.py)
            assert await line(source) in ("failed", "")
            assert memory == bytes(len(memory))
    await client.close()


@needs_nixl
async def test_a_source_that_answers_after_a_stop_is_pulled_from_again() -> None:
    """A read that had to be ended costs its connection, not the next pull."""
    theirs, ours = make_pool(seed=1), make_pool()
    source = FakeSource(blocks=range(16))
    async with pair(theirs, ours) as (server, client):
        wanted = [(n, n) for n in range(16)]
        ticket = server.offer(source, PULL_KEY, source.on_released)
        await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
        link = next(iter(client._running.values()))
        moving = link._moving
        moving._agent = None  # pyright: ignore[reportAttributeAccessIssue]
        ticket = server.offer(source, PULL_KEY, source.on_released)
        with pytest.raises(TransferError, match="lost"):
            await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
        ticket = server.offer(source, PULL_KEY, source.on_released)
        await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
    assert all_bytes(ours) == all_bytes(theirs)


async def test_without_nixl_the_same_address_is_dialled_for_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "find_nixl", lambda: None)
    server = TransferServer(make_pool(), LAYOUT, members=MEMBERS, backends=["tcp"], limits=QUICK)
    client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    source = FakeSource(blocks=range(4))
    ticket = server.offer(source, PULL_KEY, source.on_released)
    both = [server.endpoints[0].replace("tcp:", "nixl:"), *server.endpoints]
    assert (await client.pull(both, bound(ticket), [(0, 0)], timeout_s=5)).backend == "tcp"
    await client.close()
    await server.close()
    with pytest.raises(
        ValueError, match=r"nixl is not installed; run: pip install .headrace\[nixl\]"
    ):
        await TransferServer(make_pool(), LAYOUT, members=MEMBERS, backends=["nixl"]).start()
    with pytest.raises(ValueError, match="no such transfer back-end: pigeon"):
        await TransferServer(make_pool(), LAYOUT, members=MEMBERS, backends=["pigeon"]).start()

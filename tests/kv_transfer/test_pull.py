"""Pulls between a real server and a real client: every byte, whatever way it goes and whenever it becomes ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from headrace_kernels.ops import KvPool
from helpers.kv.peers import MEMBERS, QUICK
from helpers.kv.pools import (
    SHAPES,
    FakeSource,
    Shape,
    all_bytes,
    block_of,
    make_pool,
    memory_of,
    overwrite,
)
from helpers.kv.pull_keys import PULL_KEY, bound

LAYOUT = "test-1 layers_per_group=2"
BACKENDS = ("shm", "tcp")


@asynccontextmanager
async def pair(
    theirs: KvPool, ours: KvPool, backend: str
) -> AsyncGenerator[tuple[TransferServer, TransferClient]]:
    server = TransferServer(theirs, LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK)
    client = TransferClient(ours, LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    try:
        yield server, client
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize(
    ("backend", "shape"),
    # torch's own memory is not shared
    [case for case in product(BACKENDS, SHAPES) if case != ("shm", "tensor")],
)
async def test_blocks_arrive_as_they_are_and_nothing_else_changes(
    backend: str, shape: Shape
) -> None:
    theirs, ours = make_pool(shape, seed=1), make_pool(shape, seed=2)
    before = [block_of(ours, block) for block in range(ours.num_blocks)]
    source = FakeSource(blocks=(3, 4, 5, 11, 0))
    wanted = [(0, 9), (1, 10), (2, 11), (4, 2)]
    async with pair(theirs, ours, backend) as (server, client):
        ticket = server.offer(source, PULL_KEY, source.on_released)
        pulled = await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
        assert server.open_tickets == 0
    assert (pulled.backend, pulled.blocks) == (backend, 4)
    assert pulled.bytes == 4 * ours.block_bytes
    assert 0 < pulled.ms <= pulled.total_ms
    assert (source.released, source.failed) == (1, 0)
    expected = before
    for place, block in wanted:
        expected[block] = block_of(theirs, source.blocks[place])
    assert [block_of(ours, block) for block in range(ours.num_blocks)] == expected


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """Segments of 5 places and 3 groups in any order, and after how many of them the server is woken."""
    order = draw(st.permutations([(place, group) for place in range(5) for group in range(3)]))
    return order, draw(st.lists(st.integers(1, 6), min_size=15, max_size=15))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=orders(), places=st.sets(st.integers(0, 4), min_size=1))
@settings(max_examples=25, deadline=None)
async def test_what_becomes_ready_in_any_order_arrives_whole(
    backend: str, case: tuple[list[tuple[int, int]], list[int]], places: set[int]
) -> None:
    order, steps = case
    theirs, ours = make_pool(seed=1), make_pool()
    full = all_bytes(theirs)
    overwrite(theirs, 0xEE)  # what is read too early is wrong
    memory = memory_of(theirs)
    source = FakeSource(blocks=(3, 4, 5, 11, 0), done=set())
    wanted = [(place, 15 - place) for place in places]
    async with pair(theirs, ours, backend) as (server, client):
        ticket = server.offer(source, PULL_KEY, source.on_released)
        pull = asyncio.create_task(
            client.pull(server.endpoints, bound(ticket), wanted, timeout_s=20)
        )
        todo = list(order)
        for step in steps:
            for place, group in todo[:step]:
                region = theirs.groups[group][0]
                start = region.offset + source.blocks[place] * region.stride
                memory[start : start + region.nbytes] = full[start : start + region.nbytes]
                assert source.done is not None
                source.done.add((place, group))
            del todo[:step]
            server.wake()
            await asyncio.sleep(0)
        await pull
        assert not todo
    for place, block in wanted:
        at = source.blocks[place] * theirs.block_bytes
        assert block_of(ours, block) == full[at : at + theirs.block_bytes]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_sixty_four_pulls_at_once(backend: str) -> None:
    theirs, ours = make_pool(num_blocks=256, seed=1), make_pool(num_blocks=256)
    sources = [FakeSource(blocks=range(4 * n, 4 * n + 4)) for n in range(64)]
    async with pair(theirs, ours, backend) as (server, client):
        pulls = [
            client.pull(
                server.endpoints,
                bound(server.offer(source, PULL_KEY, source.on_released)),
                [(place, source.blocks[place]) for place in range(4)],
                timeout_s=20,
            )
            for source in sources
        ]
        await asyncio.gather(*pulls)
        assert server.clients == 1
    assert all_bytes(ours) == all_bytes(theirs)
    assert [source.released for source in sources] == [1] * 64


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_pull_of_nothing_is_a_release(backend: str) -> None:
    source = FakeSource(blocks=(1, 2))
    async with pair(make_pool(), make_pool(), backend) as (server, client):
        ticket = server.offer(source, PULL_KEY, source.on_released)
        pulled = await client.pull(server.endpoints, bound(ticket), [], timeout_s=20)
    assert (pulled.blocks, pulled.bytes, source.released) == (0, 0, 1)


async def test_the_best_back_end_that_both_can_do_is_taken() -> None:
    server = TransferServer(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    assert [endpoint.partition(":")[0] for endpoint in server.endpoints] == ["shm", "tcp"]
    for able, taken in ((None, "shm"), (["tcp"], "tcp")):
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, backends=able, limits=QUICK)
        source = FakeSource(blocks=(1, 2))
        ticket = server.offer(source, PULL_KEY, source.on_released)
        pulled = await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
        assert pulled.backend == taken
        await client.close()
    await server.close()


async def test_a_name_that_nobody_has_here_leaves_tcp() -> None:
    """As from another host."""
    source = FakeSource(blocks=(1, 2))
    server = TransferServer(make_pool(), LAYOUT, members=MEMBERS, backends=["tcp"], limits=QUICK)
    client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    ticket = server.offer(source, PULL_KEY, source.on_released)
    endpoints = ["shm:headrace-nobody", "word:1", "tcp:127.0.0.1:99999", *server.endpoints]
    pulled = await client.pull(endpoints, bound(ticket), [(0, 0)], timeout_s=20)
    assert pulled.backend == "tcp"
    await client.close()
    await server.close()

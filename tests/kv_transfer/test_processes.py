"""Pulls between processes, of which one is killed or stopped in the middle."""

from __future__ import annotations

import asyncio
import signal

import pytest

from headrace.kv_transfer.backends.base import TransferError
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from helpers.kv.peers import BACKENDS, LAYOUT, MEMBERS, NOTICING, Backend
from helpers.kv.pools import FakeSource, make_pool
from helpers.kv.processes import line, process, tell
from helpers.kv.pull_keys import PULL_KEY, bound


@pytest.mark.parametrize("backend", BACKENDS)
async def test_from_process_to_process(backend: Backend) -> None:
    async with process("source", backend, "5", "96") as source:
        ticket, endpoint = (await line(source)).split()
        async with process("pull", endpoint, ticket, "5") as puller:
            assert await line(source) == "asked"
            tell(source, "all")
            assert await line(puller) == "equal"
            assert await line(source) == "released"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_source_that_is_killed_or_stopped(backend: Backend, how: signal.Signals) -> None:
    client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=NOTICING)
    async with process("source", backend, "5", "96") as source:
        ticket, endpoint = (await line(source)).split()
        wanted = [(n, n) for n in range(8)]
        pull = asyncio.create_task(
            client.pull([endpoint], bound(bytes.fromhex(ticket)), wanted, timeout_s=30)
        )
        assert await line(source) == "asked"
        source.send_signal(how)
        with pytest.raises(TransferError, match="lost"):
            await pull
        if how == signal.SIGSTOP:
            source.send_signal(signal.SIGCONT)
            assert await line(source) == "failed"
    await client.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_puller_that_is_killed_or_stopped(backend: Backend, how: signal.Signals) -> None:
    server = TransferServer(
        make_pool(seed=5), LAYOUT, members=MEMBERS, backends=[backend], limits=NOTICING
    )
    await server.start()
    asked, failed = asyncio.Event(), asyncio.Event()

    class Source(FakeSource):
        def ready(self, place: int, group: int) -> bool:
            asked.set()
            return super().ready(place, group)

    source = Source(blocks=range(8), done=set())
    ticket = server.offer(source, PULL_KEY, source.on_released, failed.set)
    async with process("pull", server.endpoints[0], ticket.hex(), "5") as puller:
        async with asyncio.timeout(30):
            await asked.wait()
        puller.send_signal(how)
        async with asyncio.timeout(30):
            await failed.wait()
        source.done = None
        server.wake()
        if how == signal.SIGSTOP:
            puller.send_signal(signal.SIGCONT)
            assert await line(puller) == "lost"
    assert (source.released, server.open_tickets) == (0, 0)
    await server.close()

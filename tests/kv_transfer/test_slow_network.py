"""Bytes that are long on their way: a pull is released when they have arrived, not when they were announced."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from headrace.kv_transfer.peers import stream
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from helpers.kv.peers import MEMBERS
from helpers.kv.pools import FakeSource, block_of, make_pool, overwrite
from helpers.kv.pull_keys import PULL_KEY, bound

BLOCKS = 4


@pytest.fixture
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small socket buffers, and other tasks go first before each piece is taken."""
    begin, readable = stream.Stream.__init__, stream.Stream.readable

    def small(self: stream.Stream, sock: socket.socket) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 32 << 10)
        begin(self, sock)

    async def late(self: stream.Stream, *arguments: Any) -> Any:
        for _ in range(20):
            await asyncio.sleep(0)
        return await readable(self, *arguments)

    monkeypatch.setattr(stream.Stream, "__init__", small)
    monkeypatch.setattr(stream.Stream, "readable", late)


@pytest.mark.usefixtures("slow_network")
async def test_a_release_waits_for_the_last_byte() -> None:
    for _ in range(5):
        theirs = make_pool(num_blocks=8, groups=1, layer_bytes=32 << 10, seed=1)
        ours = make_pool(num_blocks=8, groups=1, layer_bytes=32 << 10)
        expected = [block_of(theirs, block) for block in range(BLOCKS)]
        server = TransferServer(theirs, "layout", members=MEMBERS, backends=["tcp"])
        client = TransferClient(ours, "layout", members=MEMBERS)
        await server.start()
        # as a prefill worker does once it is told: the blocks are somebody else's now
        source = FakeSource(blocks=tuple(range(BLOCKS)))
        ticket = server.offer(source, PULL_KEY, lambda pool=theirs: overwrite(pool, 0))
        places = [(block, block) for block in range(BLOCKS)]
        pulled = await client.pull(server.endpoints, bound(ticket), places, timeout_s=10)
        assert pulled.blocks == BLOCKS
        assert [block_of(ours, block) for block in range(BLOCKS)] == expected
        await client.close()
        await server.close()

"""Strangers at the port where workers pull KV from a worker: what they get, and what they keep others from."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from attack.attack import Outcome, Scale, Trial
from attack.stack import Programs
from headrace.kv_transfer.backends.base import TICKET_BYTES, LinkBroken, TransferError, layout_text
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import Members
from headrace.kv_transfer.peers.messages import KvOpen
from headrace.kv_transfer.peers.server import TransferServer
from helpers.kv.peers import BACKENDS, LAYOUT, MEMBERS, Backend, challenged, connected, prove_of
from helpers.kv.pools import FakeSource, make_pool
from helpers.kv.pull_keys import OTHER_PULL_KEY, PULL_KEY, bound

POOL = make_pool(seed=1)
MANY_BYTES = 1 << 16  # more than a Welcome has
SILENT = 256  # connections, by each way
PULLS = 3  # by each way


async def no_ticket(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """A process of the same host and user wants the descriptor of the pool, by what it may have and what it lacks."""
    async with serving() as server:
        ticket, guess = offer(server), secrets.token_bytes(TICKET_BYTES)
        nobody, elsewhere = Members(), Members([secrets.token_bytes(32)])
        got = {
            "nothing": await descriptors(server, guess, nobody),
            "a ticket": await descriptors(server, ticket, nobody),
            "a ticket and a foreign proof": await descriptors(server, ticket, elsewhere),
            "a proof": await descriptors(server, guess, MEMBERS),
            "a proof and a ticket of another": await descriptors(
                server, ticket, MEMBERS, OTHER_PULL_KEY
            ),
        }
        worker = await descriptors(server, ticket, MEMBERS)
    told = ", ".join(f"{count} for {what}" for what, count in got.items())
    # a worker gets one, so there is one to get
    return Outcome(
        f"descriptors: {told}, {worker} for a proof and a ticket of its own",
        not any(got.values()) and worker > 0,
    )


async def descriptors(
    server: TransferServer, ticket: bytes, members: Members, pull_key: bytes = PULL_KEY
) -> int:
    """How many come by shared memory before the source hangs up or welcomes whoever shows this."""
    count = 0
    async with connected(server.endpoints, "shm") as stream:
        with contextlib.suppress(LinkBroken):
            prove = prove_of(await challenged(stream, ticket), members, pull_key)
            await stream.send([prove, KvOpen(layout_text(LAYOUT, POOL), ["shm"])])
            _, fds = await stream.receive_with_fds(MANY_BYTES)
            count = len(fds)
            for fd in fds:
                os.close(fd)
    return count


async def silent_links(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """Connections without a word, as many as there may be links; then workers that want to pull."""
    waits: list[float] = []
    failed: list[str] = []
    async with serving() as server, contextlib.AsyncExitStack() as silent:
        for backend in BACKENDS:
            for _ in range(SILENT):
                await silent.enter_async_context(connected(server.endpoints, backend))
        for backend in BACKENDS * PULLS:
            began = time.monotonic()
            try:
                await pull(server, backend)
            except TransferError as error:
                failed.append(f"{backend} {error.kind}")
            waits.append(time.monotonic() - began)
    done = len(waits) - len(failed)
    told = f"{done} of {len(waits)} pulls, at most {max(waits) * 1e3:.0f} ms"
    return Outcome(", ".join([told, *failed]), not failed and max(waits) < 2)


async def pull(server: TransferServer, backend: Backend) -> None:
    """One block, by a worker that has no connection yet."""
    client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, backends=[backend])
    try:
        await client.pull(server.endpoints, bound(offer(server)), [(0, 0)], timeout_s=10)
    finally:
        await client.close()


def offer(server: TransferServer) -> bytes:
    """A ticket for two blocks of the pool."""
    return server.offer(FakeSource(blocks=(4, 5)), PULL_KEY, lambda: None)


@contextlib.asynccontextmanager
async def serving() -> AsyncGenerator[TransferServer]:
    """A worker's KV port with the bounds that it has by default."""
    server = TransferServer(POOL, LAYOUT, members=MEMBERS)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


TRIALS = [
    Trial(name="the KV pool's descriptor without a ticket", run=no_ticket),
    Trial(name="256 silent connections to the KV port", run=silent_links),
]

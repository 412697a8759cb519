"""A ticket is of use only to the worker that has its pull key, whoever else learns it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from headrace.kv_transfer.backends.base import TICKET_BYTES, LinkBroken, TransferError, layout_text
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import PROOF_BYTES, Members, SourceAnswer, pull_proof
from headrace.kv_transfer.peers.messages import (
    SCHEMA,
    Ended,
    KvOpen,
    KvProve,
    KvRefuse,
    KvRefuseReason,
    PullBlocks,
    Started,
)
from headrace.kv_transfer.peers.offers import OfferedTicket, ShownTicket
from headrace.kv_transfer.peers.server import TransferServer
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import KvFrom, KvTransfer, MigrationOrder, TransferFailure
from headrace_kernels.ops import KvPool
from helpers.kv.peers import (
    BACKENDS,
    LAYOUT,
    MEMBERS,
    QUICK,
    Backend,
    challenged,
    connected,
    greet,
    let_in,
    prove_of,
    pull_of,
    serving_of,
    until,
)
from helpers.kv.pools import FakeSource, all_bytes, block_of, make_pool
from helpers.kv.pull_keys import OTHER_PULL_KEY, PULL_KEY, bound

POOL = make_pool(seed=1)
serving = partial(serving_of, POOL)
REFUSED = Ended(1, TransferFailure.REFUSED, "the proof is not by the ticket's pull key")


@asynccontextmanager
async def a_client(ours: KvPool, backend: Backend) -> AsyncGenerator[TransferClient]:
    """A worker of the same routers."""
    client = TransferClient(ours, LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK)
    try:
        yield client
    finally:
        await client.close()


async def pull_still_works(server: TransferServer, ticket: bytes, backend: Backend) -> None:
    """For the worker that the ticket was meant for."""
    ours = make_pool()
    async with a_client(ours, backend) as client:
        await client.pull(server.endpoints, bound(ticket), [(0, 3)], timeout_s=20)
    assert block_of(ours, 3) == block_of(POOL, 4)


# --- the first ticket of a connection ---

Wrong = Callable[[Stream, bytes], Awaitable[KvProve]]
WRONG: dict[str, Wrong] = {}


def wrong(make: Wrong) -> None:
    WRONG[make.__name__] = make


@wrong
async def another_key(stream: Stream, ticket: bytes) -> KvProve:
    return prove_of(await challenged(stream, ticket), pull_key=OTHER_PULL_KEY)


@wrong
async def a_guess(stream: Stream, ticket: bytes) -> KvProve:
    prove = prove_of(await challenged(stream, ticket))
    return dataclasses.replace(prove, pull_proof=os.urandom(PROOF_BYTES))


@wrong
async def a_proof_by_the_key_of_all_workers(stream: Stream, ticket: bytes) -> KvProve:
    return prove_of(await challenged(stream, ticket), pull_key=b"k" * 32)


@wrong
async def a_proof_for_another_ticket(stream: Stream, ticket: bytes) -> KvProve:
    prove = prove_of(await challenged(stream, ticket))
    proof = pull_proof(PULL_KEY, b"".join(prove.proofs), bytes(TICKET_BYTES))
    return dataclasses.replace(prove, pull_proof=proof)


@wrong
async def a_proof_from_another_connection(stream: Stream, ticket: bytes) -> KvProve:
    """As whoever reads along hears it of the worker that has the key."""
    about = await challenged(stream, ticket)
    heard = prove_of(dataclasses.replace(about, source_nonce=bytes(len(about.source_nonce))))
    return dataclasses.replace(prove_of(about), pull_proof=heard.pull_proof)


@wrong
async def a_proof_over_fewer_proofs(stream: Stream, ticket: bytes) -> KvProve:
    """It has to be made with what shows that the client is a worker."""
    prove = prove_of(await challenged(stream, ticket))
    return dataclasses.replace(prove, pull_proof=pull_proof(PULL_KEY, b"", ticket))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_worker_without_the_key_of_its_ticket_is_not_let_in(
    backend: Backend, name: str
) -> None:
    source = FakeSource(blocks=(4, 5))
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            open_ = KvOpen(layout_text(LAYOUT, POOL), [backend])
            await stream.send([await WRONG[name](stream, ticket), open_])
            refuse, fds = await stream.receive_with_fds(1 << 16)
            assert fds == []
            with pytest.raises(LinkBroken):
                await stream.receive()
        assert refuse == KvRefuse(
            KvRefuseReason.PULL_KEY, TransferFailure.REFUSED, "that of the ticket", "another"
        )
        assert server.turned_away == {"pull_key": 1}
        assert (source.asked, source.failed) == (0, 0)
        await pull_still_works(server, ticket, backend)
        assert source.released == 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_key_of_the_ticket_makes_nobody_a_worker(backend: Backend) -> None:
    async with serving() as server:
        ticket = server.offer(FakeSource(blocks=(4, 5)), PULL_KEY, lambda: None)
        async with connected(server.endpoints, backend) as stream:
            prove = prove_of(await challenged(stream, ticket), Members([b"o" * 32]))
            await stream.send([prove, KvOpen(layout_text(LAYOUT, POOL), [backend])])
            refuse, fds = await stream.receive_with_fds(1 << 16)
        assert fds == []
        assert isinstance(refuse, KvRefuse)
        assert refuse.reason is KvRefuseReason.PROOF


# --- every other one ---


@pytest.mark.parametrize("link", ["open already", "new"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_stolen_ticket_is_of_no_use_to_another_worker(backend: Backend, link: str) -> None:
    ours = make_pool()
    source = FakeSource(blocks=(4, 5))
    async with serving() as server, a_client(ours, backend) as thief:
        if link == "open already":
            own = server.offer(FakeSource(blocks=()), OTHER_PULL_KEY, lambda: None)
            await thief.pull(server.endpoints, bound(own, OTHER_PULL_KEY), [], timeout_s=20)
        stolen = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                await thief.pull(
                    server.endpoints, bound(stolen, OTHER_PULL_KEY), [(0, 0)], timeout_s=20
                )
            assert caught.value.kind == "refused"
        assert all_bytes(ours) == all_bytes(make_pool()), "nothing was read"
        assert (source.asked, source.failed, server.open_tickets) == (0, 0, 1)
        assert server.turned_away == {"pull_key": 2}
        await pull_still_works(server, stolen, backend)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_pull_by_a_wrong_key_ends_alone_and_the_others_of_its_connection_go_on(
    backend: Backend,
) -> None:
    ours = make_pool()
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server, a_client(ours, backend) as client:
        tickets = [server.offer(source, PULL_KEY, source.on_released) for _ in range(3)]
        keys = [PULL_KEY, OTHER_PULL_KEY, PULL_KEY]
        first, second, third = (
            asyncio.create_task(
                client.pull(server.endpoints, bound(ticket, key), [(0, number)], timeout_s=20)
            )
            for number, (ticket, key) in enumerate(zip(tickets, keys, strict=True))
        )
        with pytest.raises(TransferError, match="refused: the proof is not by the ticket's"):
            await second
        await until(lambda: source.asked >= 2)
        assert not first.done()
        assert not third.done()
        source.done = None
        server.wake()
        await asyncio.gather(first, third)
        assert (server.clients, server.open_tickets) == (1, 1)
        empty = block_of(make_pool(), 1)
        assert [block_of(ours, n) for n in range(3)] == [
            block_of(POOL, 4),
            empty,
            block_of(POOL, 4),
        ]


async def test_the_key_of_whoever_dialled_is_not_that_of_the_others() -> None:
    """All of them wait for one connection; the first two are not let in."""
    source = FakeSource(blocks=(4, 5))
    async with serving() as server, a_client(make_pool(), "shm") as client:
        pulls = [
            client.pull(
                server.endpoints,
                bound(server.offer(source, PULL_KEY, source.on_released), key),
                [(0, number)],
                timeout_s=20,
            )
            for number, key in enumerate([OTHER_PULL_KEY, OTHER_PULL_KEY, PULL_KEY, PULL_KEY])
        ]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        kinds = [it.kind if isinstance(it, TransferError) else "pulled" for it in results]
        assert kinds == ["refused", "refused", "pulled", "pulled"]
        assert (server.clients, server.turned_away) == (1, {"pull_key": 2})


@pytest.mark.parametrize(
    "what",
    [
        "another key",
        "a guess",
        "for the first ticket",
        "as in a handshake",
        "of another connection",
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_each_pull_of_a_connection_needs_a_proof_of_its_own(
    backend: Backend, what: str
) -> None:
    source = FakeSource(blocks=(4, 5))
    async with serving() as server, connected(server.endpoints, backend) as stream:
        first, second = (server.offer(source, PULL_KEY, source.on_released) for _ in range(2))
        about = await challenged(stream, first)
        shared = await let_in(stream, POOL, backend, about)
        proofs = b"".join(MEMBERS.puller_proofs(about))
        proof = {
            "another key": pull_of(shared, second, [0], pull_key=OTHER_PULL_KEY).pull_proof,
            "a guess": os.urandom(PROOF_BYTES),
            "for the first ticket": pull_of(shared, first, [0]).pull_proof,
            "as in a handshake": pull_proof(PULL_KEY, proofs, second),
            "of another connection": pull_of(bytes(PROOF_BYTES), second, [0]).pull_proof,
        }[what]
        await stream.send([PullBlocks(1, second, proof, bytes(4))])
        assert await _answer(stream) == REFUSED
        assert (source.asked, server.open_tickets) == (0, 2)
        await stream.send([pull_of(shared, second, [0], 2)])
        assert await _answer(stream) == Started(2, (4).to_bytes(4, "little"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_right_key_pulls_once(backend: Backend) -> None:
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server, connected(server.endpoints, backend) as stream:
        ticket = server.offer(source, PULL_KEY, source.on_released)
        shared = await greet(stream, POOL, backend, ticket)
        await stream.send([pull_of(shared, ticket, [0], 0), pull_of(shared, ticket, [0], 1)])
        assert isinstance(await _answer(stream), Started)
        again = Ended(1, TransferFailure.REFUSED, "the ticket was used before")
        assert await _answer(stream) == again


MALFORMED = {
    "no proof": b"\x94\x02\x01\xc4\x18" + bytes(24) + b"\xc4\x04" + bytes(4),
    "31 bytes": b"\x95\x02\x01\xc4\x18" + bytes(24) + b"\xc4\x1f" + bytes(31) + b"\xc4\x04" + bytes(4),
    "text": b"\x95\x02\x01\xc4\x18" + bytes(24) + b"\xd9\x20" + b"x" * 32 + b"\xc4\x04" + bytes(4),
    "nothing": b"\x95\x02\x01\xc4\x18" + bytes(24) + b"\xc0\xc4\x04" + bytes(4),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_proof_that_cannot_be_ends_the_connection(name: str) -> None:
    body = MALFORMED[name]
    with pytest.raises(Exception, match="pull"):
        SCHEMA.decode(body)
    source = FakeSource(blocks=(4, 5))
    async with serving() as server, connected(server.endpoints, "shm") as stream:
        ticket = server.offer(source, PULL_KEY, source.on_released)
        await greet(stream, POOL, "shm", ticket)
        body = body.replace(bytes(24), ticket, 1)
        await stream._send_all([memoryview(len(body).to_bytes(4, "little") + body)])
        with pytest.raises(LinkBroken):
            await _answer(stream)
        assert (source.asked, server.open_tickets) == (0, 1)


# --- what must not be seen ---


async def test_no_key_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = b"a very secret key of 32 bytes..."
    source = FakeSource(blocks=(4, 5))
    offered = OfferedTicket(b"t", key, source, lambda: None, None, shared=False)
    holders = [
        *(bound(b"t", key), offered, ShownTicket(b"t", b"p", key), SourceAnswer(b"p", key)),
        *(KvFrom("p", [], 1, key), KvTransfer(1, key), MigrationOrder(1, key)),
    ]
    async with serving() as server, a_client(make_pool(), "tcp") as client:
        ticket = server.offer(source, key, lambda: None)
        await client.pull(server.endpoints, bound(ticket, key), [(0, 0)], timeout_s=20)
        for wrong_key in (PULL_KEY, key):  # the second time the ticket is done
            with suppress(TransferError):
                await client.pull(
                    server.endpoints, bound(ticket, wrong_key), [(0, 0)], timeout_s=20
                )
    shown = [*map(repr, holders), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in shown if key.decode() in text or key.hex() in text]


async def _answer(stream: Stream) -> object:
    """The next Started or Ended."""
    while True:
        message = await stream.receive()
        if isinstance(message, Started | Ended):
            return message

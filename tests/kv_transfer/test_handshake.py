"""What a client has to show before a source gives it anything, and a source before a client takes anything."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest

from headrace.kv_transfer.backends.base import (
    TICKET_BYTES,
    VERSION,
    LinkBroken,
    TransferError,
    layout_text,
)
from headrace.kv_transfer.backends.shm import ShmExporter
from headrace.kv_transfer.peers import client as client_module
from headrace.kv_transfer.peers import server as server_module
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import (
    NONCE_BYTES,
    PROOF_BYTES,
    Members,
    Transcript,
    pull_proof,
)
from headrace.kv_transfer.peers.messages import (
    SCHEMA,
    Alive,
    Challenge,
    KvHello,
    KvOpen,
    KvProve,
    KvRefuse,
    KvRefuseReason,
    KvWelcome,
    PullBlocks,
)
from headrace.kv_transfer.peers.server import TransferServer
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import TransferFailure
from helpers.kv.peers import (
    BACKENDS,
    HASTY,
    LAYOUT,
    MEMBERS,
    NONCE,
    QUICK,
    Backend,
    SourceScript,
    challenged,
    connected,
    forever,
    greet,
    listening,
    prove_of,
    proven,
    pull_of,
    serving_of,
    until,
)
from helpers.kv.pools import FakeSource, make_pool
from helpers.kv.pull_keys import PULL_KEY, bound

POOL = make_pool(seed=1)
serving = partial(serving_of, POOL)
OPEN = {backend: KvOpen(layout_text(LAYOUT, POOL), [backend]) for backend in BACKENDS}
SOURCE = FakeSource(blocks=(4, 5))


async def all_that_comes(stream: Stream) -> tuple[list[object], int]:
    """Messages until the source hangs up, and how many descriptors came with them."""
    messages: list[object] = []
    fds = 0
    with suppress(LinkBroken):
        while True:
            message, received = await stream.receive_with_fds(1 << 16)
            for fd in received:
                os.close(fd)
            messages.append(message)
            fds += len(received)
    return messages, fds


# --- wrong clients ---

Strange = Callable[[Stream, bytes], Awaitable[KvProve]]
STRANGE: dict[str, Strange] = {}


def strange(make: Strange) -> None:
    STRANGE[make.__name__] = make


@strange
async def no_proof(stream: Stream, ticket: bytes) -> KvProve:
    return dataclasses.replace(await proven(stream, ticket), proofs=[])


@strange
async def guessed_proofs(stream: Stream, ticket: bytes) -> KvProve:
    guesses = [secrets.token_bytes(PROOF_BYTES) for _ in range(16)]
    return dataclasses.replace(await proven(stream, ticket), proofs=guesses)


@strange
async def a_proof_of_another_deployment(stream: Stream, ticket: bytes) -> KvProve:
    return await proven(stream, ticket, members=Members([b"o" * 32]))


@strange
async def a_proof_for_another_ticket(stream: Stream, ticket: bytes) -> KvProve:
    return dataclasses.replace(await proven(stream, bytes(TICKET_BYTES)), ticket=ticket)


@strange
async def a_proof_for_another_challenge(stream: Stream, ticket: bytes) -> KvProve:
    """As one that another source has asked for."""
    await proven(stream, ticket)
    return prove_of(Transcript(NONCE, bytes(NONCE_BYTES), ticket))


@strange
async def the_proof_of_a_source(stream: Stream, ticket: bytes) -> KvProve:
    """As one gets it by letting a worker dial, which proves itself first."""
    about = await challenged(stream, ticket)
    met = MEMBERS.answer(about, MEMBERS.puller_proofs(about))
    assert met is not None
    return KvProve(ticket, [met.proof], pull_proof(PULL_KEY, met.proof, ticket))


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_without_the_right_proof_a_good_ticket_opens_nothing(
    backend: Backend, name: str
) -> None:
    async with serving() as server:
        ticket = server.offer(SOURCE, PULL_KEY, lambda: None)
        async with connected(server.endpoints, backend) as stream:
            await stream.send([await STRANGE[name](stream, ticket), OPEN[backend]])
            said, fds = await all_that_comes(stream)
        assert fds == 0
        assert said == [
            KvRefuse(KvRefuseReason.PROOF, None, "one of a worker of this router", "none of it")
        ]
        assert server.turned_away == {"proof": 1}
        assert server.open_tickets == 1


@pytest.mark.parametrize(
    "how",
    ["unknown", "released", TransferFailure.REVOKED, TransferFailure.EXPIRED, "in use"],
)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_without_a_ticket_that_is_open_the_right_proof_opens_nothing(
    backend: Backend, how: str
) -> None:
    source = FakeSource(blocks=(4, 5), done=set() if how == "in use" else None)
    async with serving() as server, connected(server.endpoints, "tcp") as first:
        ticket = bytes(TICKET_BYTES)
        if how != "unknown":
            ticket = server.offer(source, PULL_KEY, lambda: None)
        if how is TransferFailure.REVOKED or how is TransferFailure.EXPIRED:
            server.withdraw(ticket, how)
        if how == "released":
            client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
            await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
            await client.close()
        if how == "in use":
            shared = await greet(first, POOL, "tcp", ticket)
            await first.send([pull_of(shared, ticket, [0])])
            await until(lambda: source.asked > 0)
        async with connected(server.endpoints, backend) as stream:
            await stream.send([await proven(stream, ticket), OPEN[backend]])
            said, fds = await all_that_comes(stream)
        assert fds == 0
        (refuse,) = said
        assert isinstance(refuse, KvRefuse)
        assert refuse.reason is KvRefuseReason.TICKET
        assert refuse.why is (how if isinstance(how, TransferFailure) else TransferFailure.REFUSED)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_was_heard_on_one_connection_is_of_no_use_on_another(backend: Backend) -> None:
    async with serving() as server:
        ticket = server.offer(SOURCE, PULL_KEY, lambda: None, shared=True)
        async with connected(server.endpoints, backend) as stream:
            heard = await proven(stream, ticket)
            await stream.send([heard, OPEN[backend]])
            welcome, fds = await stream.receive_with_fds(1 << 16)
            for fd in fds:
                os.close(fd)
            assert isinstance(welcome, KvWelcome)
        async with connected(server.endpoints, backend) as stream:
            await stream.send([KvHello(VERSION, NONCE), heard, OPEN[backend]])
            said, fds = await all_that_comes(stream)
        assert fds == 0
        assert [type(message) for message in said] == [Challenge, KvRefuse]


async def test_no_challenge_comes_twice() -> None:
    nonces: set[bytes] = set()
    async with serving() as server:
        for _ in range(20):
            async with connected(server.endpoints, "shm") as stream:
                await stream.send([KvHello(VERSION, NONCE)])
                challenge = await stream.receive()
                assert isinstance(challenge, Challenge)
                nonces.add(challenge.nonce)
    assert len(nonces) == 20


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_proof_that_comes_too_late_meets_nobody(backend: Backend) -> None:
    async with serving(HASTY) as server:
        ticket = server.offer(SOURCE, PULL_KEY, lambda: None)
        async with connected(server.endpoints, backend) as stream:
            late = await proven(stream, ticket)
            await until(lambda: server.clients == 0)
            with suppress(LinkBroken):
                await stream.send([late, OPEN[backend]])
            assert await all_that_comes(stream) == ([], 0)
        assert server.turned_away == {"late": 1}


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def message(value: object) -> bytes:
    return framed(SCHEMA.encode(value))


def proving(proofs: bytes, pull_proof: bytes = b"\xc4\x20" + bytes(PROOF_BYTES)) -> bytes:
    """A KvProve with these fields as they are packed."""
    return framed(b"\x94\x06\xc4\x18" + TICKET + proofs + pull_proof)


TICKET = bytes(TICKET_BYTES)
PACKED_PROOF = b"\xc4\x20" + bytes(PROOF_BYTES)
NO_PROOF = bytes(PROOF_BYTES)
HELLO = message(KvHello(VERSION, NONCE))
MALFORMED = {
    "a nonce that is short": framed(b"\x93\x01\x02\xc4\x0f" + bytes(15)),
    "a version that is text": framed(b"\x93\x01\xa12\xc4\x10" + bytes(16)),
    "a hello of the first version": framed(b"\x95\x01\x01\xa0\x90\xc4\x00"),
    "hello twice": HELLO + HELLO,
    "prove first": message(KvProve(TICKET, [], NO_PROOF)),
    "open first": message(OPEN["shm"]),
    "open without a proof": HELLO + message(OPEN["shm"]),
    "pull first": message(PullBlocks(0, TICKET, NO_PROOF, b"")),
    "pull without a proof": HELLO + message(PullBlocks(0, TICKET, NO_PROOF, b"")),
    "alive first": message(Alive()),
    "alive for a proof": HELLO + message(Alive()),
    "a welcome": message(KvWelcome("shm", b"", bytes(PROOF_BYTES))),
    "a ticket of 23 bytes": HELLO + framed(b"\x94\x06\xc4\x17" + bytes(23) + b"\x90" + PACKED_PROOF),
    "a proof of 31 bytes": HELLO + proving(b"\x91\xc4\x1f" + bytes(31)),
    "17 proofs": HELLO + proving(b"\xdc\0\x11" + 17 * PACKED_PROOF),
    "proofs without number": HELLO + proving(b"\xdd\xff\xff\xff\xff"),
    "a proof that is text": HELLO + proving(b"\x91\xa1x"),
    "no pull proof": HELLO + framed(b"\x93\x06\xc4\x18" + TICKET + b"\x90"),
    "a pull proof of 31 bytes": HELLO + proving(b"\x90", b"\xc4\x1f" + bytes(31)),
    "a pull proof that is text": HELLO + proving(b"\x90", b"\xd9\x20" + b"x" * 32),
    "a pull proof of nothing": HELLO + proving(b"\x90", b"\xc0"),
    "more than a stranger may say": HELLO + (1025).to_bytes(4, "little"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_who_breaks_the_rules_of_the_handshake_gets_nothing(
    backend: Backend, name: str
) -> None:
    async with serving() as server:
        async with connected(server.endpoints, backend) as stream:
            await stream._send_all([memoryview(MALFORMED[name])])
            said, fds = await all_that_comes(stream)
        assert fds == 0
        assert all(isinstance(answer, Challenge) for answer in said)
        await until(lambda: server.clients == 0)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_follows_the_proof_is_bounded_too(backend: Backend) -> None:
    async with serving() as server:
        ticket = server.offer(SOURCE, PULL_KEY, lambda: None)
        async with connected(server.endpoints, backend) as stream:
            await stream.send([await proven(stream, ticket)])
            await stream._send_all([memoryview((65 << 10).to_bytes(4, "little"))])
            assert await all_that_comes(stream) == ([], 0)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_another_version_is_refused(backend: Backend) -> None:
    async with serving() as server, connected(server.endpoints, backend) as stream:
        await stream.send([KvHello(VERSION + 1, NONCE)])
        assert await stream.receive() == KvRefuse(
            KvRefuseReason.VERSION, None, str(VERSION), str(VERSION + 1)
        )


async def test_no_back_end_in_common() -> None:
    async with serving() as server, connected(server.endpoints, "tcp") as stream:
        prove = await proven(stream, server.offer(SOURCE, PULL_KEY, lambda: None))
        await stream.send([prove, KvOpen(layout_text(LAYOUT, POOL), ["shm", "pigeon"])])
        assert await stream.receive() == KvRefuse(
            KvRefuseReason.BACKENDS, None, "tcp", "shm, pigeon"
        )


async def test_another_user_hears_not_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        monkeypatch.setattr(server_module, "peer_credentials", lambda _: (1, 12345))
        async with connected(server.endpoints, "shm") as stream:
            assert await all_that_comes(stream) == ([], 0)
        assert server.turned_away == {"user": 1}


# --- keys ---


async def a_pull(server: TransferServer, members: Members) -> str:
    """What became of it."""
    client = TransferClient(make_pool(), LAYOUT, members=members, limits=QUICK)
    ticket = server.offer(SOURCE, PULL_KEY, lambda: None, shared=True)
    try:
        pulled = await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
    except TransferError as error:
        return error.kind
    finally:
        await client.close()
    return pulled.backend


async def test_workers_that_share_any_router_move_kv() -> None:
    ours, theirs = Members(), Members()
    async with serving(members=theirs) as server:
        assert await a_pull(server, ours) == "lost"  # no router has taken either of them
        theirs.trust([b"a" * 32])
        assert await a_pull(server, ours) == "lost"
        ours.trust([b"b" * 32])
        assert await a_pull(server, ours) == "lost"
        ours.trust([b"b" * 32, b"a" * 32])
        assert await a_pull(server, ours) == "shm"
        theirs.trust([])  # that router has gone
        assert await a_pull(server, ours) == "lost"


# --- wrong sources ---


@pytest.mark.parametrize("how", ["none", "guessed", "the client's own", "for another ticket"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_source_that_proves_nothing_is_not_pulled_from(
    backend: Backend, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped(*_: object) -> None:
        raise AssertionError("the memory of a stranger was looked at")

    monkeypatch.setattr(client_module, "open_mover", mapped)

    async def serve(stream: Stream) -> None:
        script = SourceScript(stream, POOL, backend)
        about = await script.challenge()
        if how == "none":
            script.proof = bytes(PROOF_BYTES)
        if how == "guessed":
            script.proof = secrets.token_bytes(PROOF_BYTES)
        if how == "the client's own":
            (script.proof,) = MEMBERS.puller_proofs(about)
        if how == "for another ticket":
            other = dataclasses.replace(about, ticket=b"t" * TICKET_BYTES)
            met = MEMBERS.answer(other, MEMBERS.puller_proofs(other))
            assert met is not None
            script.proof = met.proof
        exporter = ShmExporter(POOL)
        described, fds = exporter.describe()
        welcome = KvWelcome(backend, described, script.proof)
        if backend == "shm":
            await stream.send_with_fds(welcome, fds)
        else:
            await stream.send([welcome])
        exporter.close()
        with pytest.raises(LinkBroken):
            await forever(stream)

    async with listening(backend, serve) as endpoints:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
        with pytest.raises(TransferError, match="no worker of our routers") as caught:
            await client.pull(endpoints, bound(TICKET), [(0, 0)], timeout_s=20)
        assert caught.value.kind == "lost"
        await client.close()


# --- pulls that share a connection ---


async def test_the_ticket_of_whoever_dialled_is_not_that_of_the_others() -> None:
    """All of them wait for one connection; only the first one's ticket is spent."""
    async with serving() as server:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
        spent = [server.offer(SOURCE, PULL_KEY, lambda: None) for _ in range(2)]
        good = [server.offer(SOURCE, PULL_KEY, lambda: None) for _ in range(3)]
        for ticket in spent:
            server.withdraw(ticket)
        pulls = [
            client.pull(server.endpoints, bound(ticket), [(0, number)], timeout_s=20)
            for number, ticket in enumerate([*spent, *good])
        ]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        kinds = [it.kind if isinstance(it, TransferError) else "pulled" for it in results]
        assert kinds == ["revoked", "revoked", "pulled", "pulled", "pulled"]
        assert server.open_tickets == 0
        assert server.clients == 1
        await client.close()


async def test_a_pull_that_dialled_and_was_cancelled_leaves_the_others_their_connection() -> None:
    async with serving() as server:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
        first, second = (server.offer(SOURCE, PULL_KEY, lambda: None) for _ in range(2))
        dialling = asyncio.create_task(
            client.pull(server.endpoints, bound(first), [(0, 0)], timeout_s=20)
        )
        waiting = asyncio.create_task(
            client.pull(server.endpoints, bound(second), [(0, 1)], timeout_s=20)
        )
        await until(lambda: server.clients == 1)
        dialling.cancel()
        server.withdraw(first)  # so that the handshake fails, if it has not come that far
        assert (await waiting).backend == "shm"
        await client.close()

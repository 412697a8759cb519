"""A server whose clients are bad: gone, silent, slow, or wrong. It survives, and keeps nothing of them."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from headrace.kv_transfer.backends.base import LinkBroken, TransferError, layout_text
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.members import PROOF_BYTES
from headrace.kv_transfer.peers.messages import (
    Abort,
    Alive,
    Closed,
    Data,
    Ended,
    Ready,
    Release,
    Started,
)
from headrace.kv_transfer.peers.server import TransferServer
from headrace.kv_transfer.peers.stream import Stream
from headrace.wire.frames import TransferFailure
from helpers.kv.peers import (
    BACKENDS,
    HASTY,
    LAYOUT,
    MEMBERS,
    QUICK,
    Backend,
    connected,
    forever,
    greet,
    proven,
    pull_of,
    serving_of,
    until,
)
from helpers.kv.pools import FakeSource, all_bytes, make_pool, overwrite
from helpers.kv.pull_keys import PULL_KEY, bound

POOL = make_pool(seed=1)
serving = partial(serving_of, POOL)


async def talk_on(stream: Stream) -> None:
    """Alive, and deaf."""
    while True:
        await stream.send([Alive()])
        await asyncio.sleep(0)


async def ask_on(stream: Stream) -> None:
    for number in count():
        await stream.send([pull_of(bytes(PROOF_BYTES), bytes(24), [], number)])


async def all_gone(server: TransferServer) -> None:
    """Wait until it serves nobody."""
    while server.clients:
        await asyncio.wait(list(server._serving))
        await asyncio.sleep(0)  # for its callback


async def next_of(stream: Stream, *kinds: type) -> object:
    """The next message of one of these kinds; bytes of segments are thrown away."""
    while True:
        message = await stream.receive()
        if isinstance(message, Data):
            await stream._exactly((message.stop - message.start) * 192)
        if isinstance(message, kinds):
            return message


STEPS = (
    *("connected", "half a hello", "challenged", "proved"),
    *("greeted", "pulling", "half moved", "moved"),
)


async def behave_until(stream: Stream, step: str, backend: Backend, ticket: bytes) -> None:
    if step == "connected":
        return
    if step == "half a hello":
        await stream._send_all([memoryview(b"\x14\0\0\0\x93")])
        return
    if step == "challenged":
        await proven(stream, ticket)
        return
    if step == "proved":
        await stream.send([await proven(stream, ticket)])
        return
    shared = await greet(stream, POOL, backend, ticket)
    if step == "greeted":
        return
    await stream.send([pull_of(shared, ticket, [0, 1])])
    if step == "pulling":
        return
    kind = Ready if backend == "shm" else Data
    await next_of(stream, kind)
    if step == "moved":
        await next_of(stream, kind)
        await next_of(stream, kind)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_client_that_vanishes_leaves_nothing(backend: Backend, step: str) -> None:
    source = FakeSource(blocks=(4, 5))
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            await behave_until(stream, step, backend, ticket)
            await until(lambda: server.clients == 1)
            stream.close("vanished")
            await all_gone(server)
            began = step in STEPS[6:]
            if step != "pulling":  # there, the pull may or may not have been read
                assert source.failed == int(began)
                assert server.open_tickets == int(not began)
            assert source.released == 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_client_that_falls_silent_is_dropped(backend: Backend, step: str) -> None:
    """As when its host is gone, or it is stopped: before the handshake by its time-out, then by heartbeats."""
    source = FakeSource(blocks=(4, 5))
    async with serving(HASTY if step in STEPS[:4] else QUICK) as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            await until(lambda: server.clients == 1)
            await behave_until(stream, step, backend, ticket)
            async with asyncio.timeout(30):
                await all_gone(server)
            assert source.failed == int(step in STEPS[5:])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        (1025).to_bytes(4, "little") + bytes(1025),
        bytes(4),
        b"\x03\0\0\0abc",
        b"\x05\0\0\0\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\x02\0\0\0\x91\x05",  # Alive is no Hello
        b"\x02\0\0\0\x91\x7f",
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_garbage_instead_of_a_hello(backend: Backend, garbage: bytes) -> None:
    async with serving() as server:
        async with connected(server.endpoints, backend) as stream:
            with suppress(LinkBroken):  # it may have hung up before it had all
                await stream._send_all([memoryview(garbage)])
            with pytest.raises(LinkBroken):
                await forever(stream)
            await all_gone(server)
        await a_good_pull(server, backend)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x03\0\0\0abc",
        ((1 << 20) + 1).to_bytes(4, "little"),
        b"\x04\0\0\0\x94\x02\x00\xc4",  # ends inside
        b"\x05\0\0\0\x94\x02\x00\xc4\x00",  # a field too few
        b"\x07\0\0\0\x94\x02\x00\xc4\x00\xc4\x00",  # a ticket of no bytes
        b"\x03\0\0\0\x92\x23\x00",  # Ready is for servers to say
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_garbage_after_the_handshake(backend: Backend, garbage: bytes) -> None:
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            shared = await greet(stream, POOL, backend, ticket)
            await stream.send([pull_of(shared, ticket, [0, 1])])
            await stream._send_all([memoryview(garbage)])
            with pytest.raises(LinkBroken):
                await forever(stream)
            await all_gone(server)
            assert (source.failed, server.open_tickets) == (1, 0)


async def a_good_pull(server: TransferServer, backend: Backend) -> None:
    ours = make_pool()
    client = TransferClient(ours, LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK)
    source = FakeSource(blocks=(4, 5))
    ticket = server.offer(source, PULL_KEY, source.on_released)
    await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
    await client.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_layouts_must_be_equal_and_both_are_said(backend: Backend) -> None:
    async with serving() as server:
        source = FakeSource(blocks=(4, 5))
        ticket = server.offer(source, PULL_KEY, source.on_released)
        for ours, layout in (
            (make_pool(), "test-1 layers_per_group=4"),  # the group size is part of the text
            (make_pool(groups=2), LAYOUT),
            (make_pool("layer-major"), LAYOUT),
        ):
            client = TransferClient(ours, layout, members=MEMBERS, backends=[backend], limits=QUICK)
            with pytest.raises(TransferError) as caught:
                await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
            assert caught.value.kind == "layout"
            assert layout_text(layout, ours) in caught.value.message
            assert layout_text(LAYOUT, POOL) in caught.value.message
            await client.close()
        assert server.open_tickets == 1


@pytest.mark.parametrize("link", ["open already", "new"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_tickets_that_are_not_good(backend: Backend, link: str) -> None:
    async with serving() as server:
        client = TransferClient(
            make_pool(), LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK
        )
        source = FakeSource(blocks=(4, 5))
        if link == "open already":
            good = server.offer(source, PULL_KEY, lambda: None)
            await client.pull(server.endpoints, bound(good), [(0, 0)], timeout_s=20)

        async def kind_of(ticket: bytes, place: int = 0) -> str:
            with pytest.raises(TransferError) as caught:
                await client.pull(server.endpoints, bound(ticket), [(place, 0)], timeout_s=20)
            return caught.value.kind

        assert await kind_of(bytes(24)) == "refused"
        done = server.offer(source, PULL_KEY, source.on_released)
        await client.pull(server.endpoints, bound(done), [(0, 0)], timeout_s=20)
        assert await kind_of(done) == "refused"
        for why in (TransferFailure.REVOKED, TransferFailure.EXPIRED):
            withdrawn = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
            server.withdraw(withdrawn, why)
            assert await kind_of(withdrawn) == why
        taken_back = FakeSource(blocks=(4, 5), revoked=True)
        assert await kind_of(server.offer(taken_back, PULL_KEY, source.on_released)) == "revoked"
        assert (
            await kind_of(server.offer(source, PULL_KEY, source.on_released), place=2) == "refused"
        )
        assert (source.released, source.failed) == (1, 0)
        await client.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_ticket_is_for_one_pull_unless_it_is_shared(backend: Backend) -> None:
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server:
        once = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            shared = await greet(stream, POOL, backend, once)
            await stream.send([pull_of(shared, once, [0], 0), pull_of(shared, once, [0], 1)])
            assert await next_of(stream, Ended) == Ended(
                1, TransferFailure.REFUSED, "the ticket was used before"
            )
            stream.close("the first one goes on no longer")
            await all_gone(server)
            assert (source.failed, server.open_tickets) == (1, 0)

            source.done = None
            often = server.offer(
                source, PULL_KEY, source.on_released, source.on_failed, shared=True
            )
            for _ in range(3):
                client = TransferClient(
                    make_pool(), LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK
                )
                await client.pull(server.endpoints, bound(often), [(1, 0)], timeout_s=20)
                await client.close()
            assert (source.released, source.failed, server.open_tickets) == (3, 1, 1)


@pytest.mark.parametrize("how", ["withdrawn", "revoked"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_revoked_while_it_waits(backend: Backend, how: str) -> None:
    source = FakeSource(blocks=(4, 5), done={(0, 0)})
    async with serving() as server:
        client = TransferClient(
            make_pool(), LAYOUT, members=MEMBERS, backends=[backend], limits=QUICK
        )
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        pull = asyncio.create_task(
            client.pull(server.endpoints, bound(ticket), [(0, 0), (1, 1)], timeout_s=20)
        )
        await until(lambda: source.asked > 0)
        if how == "withdrawn":
            server.withdraw(ticket)
        else:
            source.revoked = True  # noticed at the next heartbeat at the latest
        with pytest.raises(TransferError, match="revoked"):
            await pull
        assert source.released == 0
        assert server.open_tickets == 0
        await client.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_revoked_after_the_last_byte_and_before_the_release(backend: Backend) -> None:
    source = FakeSource(blocks=(4, 5))
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, backend) as stream:
            shared = await greet(stream, POOL, backend, ticket)
            await stream.send([pull_of(shared, ticket, [0, 1])])
            for _ in range(3):
                await next_of(stream, Ready if backend == "shm" else Data)
            source.revoked = True
            await stream.send([Release(0)])
            answer = await next_of(stream, Closed, Ended)
            assert answer in (
                Closed(0, False),
                Ended(0, TransferFailure.REVOKED, "the source took its blocks back"),
            )
            assert (source.released, source.failed) == (0, 1)


async def test_a_release_before_everything_was_handed_over_is_not_intact() -> None:
    source = FakeSource(blocks=(4, 5), done={(0, 0)})
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, "shm") as stream:
            shared = await greet(stream, POOL, "shm", ticket)
            await stream.send([pull_of(shared, ticket, [0, 1]), Release(0), Release(0), Abort(7)])
            assert await next_of(stream, Closed) == Closed(0, False)
            assert source.failed == 1


async def test_after_withdraw_nobody_is_called() -> None:
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
        async with connected(server.endpoints, "tcp") as stream:
            shared = await greet(stream, POOL, "tcp", ticket)
            await stream.send([pull_of(shared, ticket, [0, 1])])
            await next_of(stream, Started)
            server.withdraw(ticket, TransferFailure.EXPIRED)
            server.withdraw(ticket, TransferFailure.REVOKED)  # not there any more: nothing
            ended = await next_of(stream, Ended)
            assert isinstance(ended, Ended)
            assert ended.why == "expired"
        await all_gone(server)
        assert (source.released, source.failed) == (0, 0)


async def test_a_number_that_was_used_before_closes_the_connection() -> None:
    source = FakeSource(blocks=(4, 5))
    async with serving() as server:
        ticket = server.offer(source, PULL_KEY, source.on_released)
        async with connected(server.endpoints, "shm") as stream:
            shared = await greet(stream, POOL, "shm", ticket)
            await stream.send([pull_of(shared, ticket, [0], 5), pull_of(shared, ticket, [0], 5)])
            with pytest.raises(LinkBroken):
                await forever(stream)


async def test_more_pulls_than_a_client_may_have() -> None:
    async with serving(dataclasses.replace(QUICK, max_pulls=2)) as server:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
        source = FakeSource(blocks=(4, 5), done=set())
        pulls = [
            asyncio.create_task(
                client.pull(
                    server.endpoints,
                    bound(server.offer(source, PULL_KEY, source.on_released)),
                    [(0, n)],
                    timeout_s=20,
                )
            )
            for n in range(3)
        ]
        done, waiting = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, TransferError)
        assert error.kind == "no_room"
        source.done = None
        server.wake()
        await asyncio.gather(*waiting)
        await client.close()


async def test_a_client_that_takes_no_bytes_is_dropped() -> None:
    """It is alive and never reads: what it asked for stays in the source's pool, not in a buffer."""
    big = make_pool(num_blocks=64, layer_bytes=96 << 10, seed=None)
    overwrite(big, 7)
    source = FakeSource(blocks=range(64))
    server = TransferServer(big, LAYOUT, members=MEMBERS, backends=["tcp"], limits=QUICK)
    await server.start()
    ticket = server.offer(source, PULL_KEY, source.on_released, source.on_failed)
    async with connected(server.endpoints, "tcp") as stream:
        shared = await greet(stream, big, "tcp", ticket)
        await stream.send([pull_of(shared, ticket, list(range(64)))])
        with pytest.raises(LinkBroken):
            await talk_on(stream)
        await all_gone(server)
        assert source.failed == 1
    await server.close()


async def test_a_client_that_asks_and_never_listens_is_dropped() -> None:
    async with serving() as server, connected(server.endpoints, "shm") as stream:
        ticket = server.offer(FakeSource(blocks=(4,)), PULL_KEY, lambda: None)
        await greet(stream, POOL, "shm", ticket)
        with pytest.raises(LinkBroken):
            await ask_on(stream)
        await all_gone(server)


async def test_a_closed_server_loses_its_clients() -> None:
    source = FakeSource(blocks=(4, 5), done=set())
    async with serving() as server:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=QUICK)
        ticket = server.offer(source, PULL_KEY, source.on_released)
        endpoints = list(server.endpoints)
        pull = asyncio.create_task(client.pull(endpoints, bound(ticket), [(0, 0)], timeout_s=20))
        await until(lambda: source.asked > 0)
        await server.close()
        with pytest.raises(TransferError, match="lost"):
            await pull
        with pytest.raises(TransferError, match="lost"):
            await client.pull(endpoints, bound(ticket), [(0, 0)], timeout_s=20)
        await client.close()


async def test_an_idle_client_hangs_up_and_comes_back() -> None:
    limits = dataclasses.replace(QUICK, idle_s=0.1)
    async with serving() as server:
        client = TransferClient(make_pool(), LAYOUT, members=MEMBERS, limits=limits)
        source = FakeSource(blocks=(4, 5))
        for _ in range(2):
            ticket = server.offer(source, PULL_KEY, source.on_released)
            await client.pull(server.endpoints, bound(ticket), [(0, 0)], timeout_s=20)
            await all_gone(server)
        await client.close()


async def test_the_source_is_never_written_to() -> None:
    async with serving() as server:
        for backend in BACKENDS:
            await a_good_pull(server, backend)
    assert all_bytes(POOL) == all_bytes(make_pool(seed=1))

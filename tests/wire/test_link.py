"""The worker's link against a router that works: frames go both ways, and sessions end."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.errors import FrameTooLong, LinkClosed, LinkLost, UnknownFrameType
from headrace.wire.frames import (
    MAX_FRAME_BYTES,
    Bye,
    Frame,
    Hello,
    ModelPart,
    Ping,
    Sampling,
    Submit,
)
from headrace.wire.link import Session
from helpers.worker.link_scene import HEARTBEAT, WELCOME, Peer, hold, link_to, packed, router


async def test_frames_go_both_ways_in_order() -> None:
    got: list[Frame] = []
    done = asyncio.Event()

    async def script(peer: Peer) -> None:
        got.append(await peer.welcome(Ping(1), Ping(2)))
        got.extend([await peer.read() for _ in range(3)])
        await peer.write(packed(Ping(3)))
        await peer.gone()
        done.set()

    async with router(script) as at:
        async with await link_to(at).connect() as session:
            assert (session.router, session.heartbeat_s) == ("router-0", 0.25)
            assert session.hash_key == bytes(range(32))
            assert [await session.receive(), await session.receive()] == [Ping(1), Ping(2)]
            await session.send(HEARTBEAT, Bye("one"))
            await session.send(Bye("two"))
            async for frame in session:
                assert frame == Ping(3)
                break
        await done.wait()
    assert isinstance(got[0], Hello)
    assert len(got[0].nonce) == 16
    assert got[1:] == [HEARTBEAT, Bye("one"), Bye("two")]


async def test_work_may_come_in_the_same_bytes_as_the_welcome() -> None:
    long = Submit(1, bytes(200_000), Sampling(), [], 1)  # more than a stranger may send

    async def script(peer: Peer) -> None:
        await peer.welcome(Ping(1), long)
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        assert [await session.receive(), await session.receive()] == [Ping(1), long]


async def test_frames_may_come_in_single_bytes() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        for byte in packed(WELCOME, Ping(2**40), Ping(5)):
            await peer.write(bytes([byte]))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        assert [await session.receive(), await session.receive()] == [Ping(2**40), Ping(5)]


async def test_close_sends_what_was_handed_over() -> None:
    got: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.welcome()
        got.append(len(await peer.reader.read()))

    message = ModelPart("f", 0, True, bytes(4 << 20))
    async with router(script) as at:
        session = await link_to(at).connect()
        await session.send(message)
        await session.close()
        with pytest.raises(LinkLost, match="was closed"):
            await session.send(HEARTBEAT)
    assert got == [len(packed(message))]


async def test_a_unix_socket_works_too(tmp_path: Path) -> None:
    async with (
        router(hold, unix=tmp_path / "router.sock") as at,
        await link_to(at).connect() as session,
    ):
        await session.send(HEARTBEAT)


async def test_tcp_sends_at_once_and_notices_a_vanished_peer() -> None:
    async with router(hold) as at, await link_to(at, dead_after_s=7.0).connect() as session:
        transport = session._connection._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def lost(session: Session) -> LinkLost:
    """How the session ended; sending must say the same."""
    with pytest.raises(LinkLost) as receiving:
        async for _ in session:
            pass
    with pytest.raises(LinkLost) as sending:
        await session.send(HEARTBEAT)
    assert str(receiving.value) == str(sending.value)
    return receiving.value


@pytest.mark.parametrize(
    ("data", "reason", "cause"),
    [
        (b"", "the router closed the link", None),
        (packed(Ping(1))[:3], "closed the link inside a frame", None),
        (packed(Ping(1))[:5], "closed the link inside a frame", None),
        (b"\x02\0\0\0\x91\x63", "garbage: unknown frame type 99", UnknownFrameType),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "garbage: frame of", FrameTooLong),
    ],
)
async def test_a_lost_link_says_why(
    data: bytes, reason: str, cause: type[Exception] | None
) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(Ping(7))
        await peer.write(data)

    async with router(script) as at:
        session = await link_to(at).connect()
        assert await session.receive() == Ping(7)  # what came before counts
        error = await lost(session)
        assert reason in str(error)
        assert type(error.__cause__) is (cause or type(None))
        assert isinstance(error, LinkClosed) == (not data), "which is how a router ends"
        await session.close()  # no harm


async def test_each_session_begins_anew() -> None:
    hellos: list[Hello] = []

    async def once(peer: Peer) -> None:
        hellos.append(await peer.welcome())

    async def stay(peer: Peer) -> None:
        hellos.append(await peer.welcome())
        await peer.gone()

    async with router(once, stay) as at:
        link = link_to(at)
        first = await link.connect()
        await lost(first)
        async with await link.connect() as second:
            await second.send(HEARTBEAT)
    assert len({hello.nonce for hello in hellos}) == 2


async def send_until(session: Session, message: ModelPart, most: int) -> None:
    for _ in range(most):
        await session.send(message)
    pytest.fail("send() never waited")


async def test_a_router_that_takes_nothing_is_lost() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await release.wait()

    big = ModelPart("f", 0, False, bytes(1 << 20))
    async with router(script) as at:
        link = link_to(at, write_timeout_s=0.2, max_unsent_bytes=1 << 16)
        session = await link.connect()
        with pytest.raises(LinkLost, match="took nothing for"):
            await send_until(session, big, 100)
        release.set()


async def test_sending_waits_for_a_slow_router_and_goes_on() -> None:
    go_on = asyncio.Event()
    total = 0

    async def script(peer: Peer) -> None:
        nonlocal total
        await peer.welcome()
        await go_on.wait()
        total = len(await peer.reader.read())

    big = ModelPart("f", 0, False, bytes(1 << 20))
    async with (
        router(script) as at,
        await link_to(at, max_unsent_bytes=1 << 16).connect() as session,
    ):
        transport = session._connection._transport
        assert transport is not None
        sent = 0
        while session._connection._has_room.is_set():  # until socket and buffer are full
            await session.send(big)
            await asyncio.sleep(0)  # the loop may write
            sent += 1
        waiter = asyncio.create_task(session.send(big))
        held = transport.get_write_buffer_size()
        done, _ = await asyncio.wait([waiter], timeout=0.05)
        assert not done
        assert transport.get_write_buffer_size() == held  # nothing piles up
        go_on.set()
        await waiter
    assert total == (sent + 1) * len(packed(big))


async def test_frames_that_nobody_takes_stay_in_the_socket() -> None:
    count = 30_000  # 210 kB
    flooded = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        peer.writer.write(packed(*[Ping(n % 100) for n in range(count)]))
        flooded.set()
        await peer.gone()

    async with (
        router(script) as at,
        await link_to(at, max_unread_frames=50).connect() as session,
    ):
        await flooded.wait()
        connection = session._connection
        most = 0
        for n in range(count):
            assert await session.receive() == Ping(n % 100)
            most = max(most, len(connection._inbox))
        assert 10 < most <= 50


async def test_a_cancelled_receive_loses_no_frame() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await go_on.wait()
        await peer.write(packed(Ping(1)))
        await peer.gone()

    async with router(script) as at, await link_to(at).connect() as session:
        waiting = asyncio.create_task(session.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await session.receive() == Ping(1)


@pytest.mark.parametrize("stage", ["handshake", "backoff"])
async def test_dialling_can_be_cancelled(stage: str) -> None:
    dialled, hung_up = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.hello()
        dialled.set()
        if stage == "handshake":
            await peer.gone()
        hung_up.set()

    async with router(script) as at:
        dial = asyncio.create_task(link_to(at, first_backoff_s=3600, max_backoff_s=3600).connect())
        await dialled.wait()
        if stage == "backoff":
            await hung_up.wait()
        dial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dial
        await hung_up.wait()


async def test_an_error_inside_a_session_hangs_up_at_once() -> None:
    hung_up = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.gone()
        hung_up.set()

    async with router(script) as at:
        with pytest.raises(ZeroDivisionError):
            async with await link_to(at).connect():
                raise ZeroDivisionError
        await hung_up.wait()


@pytest.mark.parametrize(
    "test",
    [
        test_frames_go_both_ways_in_order,
        test_work_may_come_in_the_same_bytes_as_the_welcome,
        test_frames_may_come_in_single_bytes,
        test_close_sends_what_was_handed_over,
        test_tcp_sends_at_once_and_notices_a_vanished_peer,
        test_each_session_begins_anew,
        test_a_router_that_takes_nothing_is_lost,
        test_sending_waits_for_a_slow_router_and_goes_on,
        test_frames_that_nobody_takes_stay_in_the_socket,
        test_a_cancelled_receive_loses_no_frame,
        test_an_error_inside_a_session_hangs_up_at_once,
    ],
    ids=lambda test: test.__name__,
)
def test_on_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())

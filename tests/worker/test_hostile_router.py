"""A router that asks for too much, or takes nothing: it costs the worker bounded memory, and other routers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FrameTruncated, MalformedFrame, WireError
from headrace.kv_transfer import migration
from headrace.wire import codec, schema
from headrace.wire.codec import MAX_VALUES
from headrace.wire.frames import (
    Cancel,
    Continue,
    Failed,
    FailureKind,
    Fetch,
    Freed,
    KvFrom,
    Resync,
    Snapshot,
    Ticket,
)
from headrace.wire.link import Session
from headrace.worker import outbox as outbox_module
from headrace.worker import sessions
from headrace.worker.outbox import MOST_ENDS, Outbox
from helpers.engine.toy import make_submit
from helpers.kv.pull_keys import PULL_KEY
from helpers.worker.fake_router import FakeRouter
from helpers.worker.link_scene import WELCOME, Peer, link_to, packed, router
from helpers.worker.scene import joined, running, true_greedy
from helpers.worker.split import Pair, pair

MIB = 1 << 20

# --- frames ---


def packed_values(values: Any) -> bytes:
    body = msgpack.packb(values)
    assert body is not None
    return body


def bomb(values: list[Any]) -> bytes:
    """A Submit whose stop ids are `values`."""
    fields: Any = msgpack.unpackb(codec.encode(make_submit(1, [1, 2, 3])))
    fields[4] = values
    return packed_values(fields)


@pytest.mark.parametrize(
    "values", [[1] * MAX_VALUES, [[]] * MAX_VALUES, [[0] * 600] * 600, [{}] * MAX_VALUES, [""] * MAX_VALUES]
)  # fmt: skip
def test_a_frame_of_very_many_values_is_refused_before_any_is_made(
    values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = bomb(values)

    def make(*_: object, **__: object) -> None:
        raise AssertionError("its values were made")

    monkeypatch.setattr(schema.msgpack, "unpackb", make)
    with pytest.raises(MalformedFrame, match=f"at most {MAX_VALUES} values"):
        codec.decode(body)


def test_long_frames_that_a_router_has_reason_to_send_are_read() -> None:
    prompt = make_submit(1, list(range(100_000)))
    assert codec.decode(codec.encode(prompt)) == prompt
    blocks = 65_536
    hot = Fetch(
        request=1,
        kv_from=KvFrom("p", ["tcp:h:1"], 1000, PULL_KEY),
        ticket=bytes(24),
        names=bytes(16 * blocks),
        parents=[-1] * blocks,
        offset=list(range(2**31, 2**31 + blocks)),
    )
    assert codec.decode(codec.encode(hot)) == hot


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=60,
)


def count_of(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count_of, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count_of(inner) for inner in value.values())
    return 1


@given(VALUES)
def test_values_are_counted_whatever_they_are(value: Any) -> None:
    body, count = packed_values(value), count_of(value)
    assert schema._has_few_values(body, count)
    assert not schema._has_few_values(body, count - 1)


@given(st.integers(0, 255), st.binary(max_size=70_000))
def test_no_bytes_are_read_as_more_than_they_are(first: int, rest: bytes) -> None:
    """Of any kind, cut anywhere: a WireError, or a frame; never anything else."""
    body = bytes([first]) + rest
    with contextlib.suppress(WireError):
        codec.decode(body + bytes(schema.FEW_BYTES))
    with pytest.raises(WireError):
        codec.decode(b"\xdd\xff\xff\xff\xff" + body)  # an array of four thousand million


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_what_is_promised_and_not_there_is_not_waited_for(head: bytes) -> None:
    with pytest.raises(FrameTruncated):
        codec.decode(head + bytes(schema.FEW_BYTES))


# --- the link ---


async def test_frames_that_nobody_takes_are_bounded_by_their_bytes() -> None:
    prompt = make_submit(1, [1] * (MIB // 4))
    flooded = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(30):
            peer.writer.write(packed(prompt))
        flooded.set()
        await peer.gone()

    async with (
        router(script) as at,
        await link_to(at, max_unread_bytes=4 * MIB).connect() as session,
    ):
        await flooded.wait()
        connection = session._connection
        while connection._reading:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert 4 * MIB <= connection._unread_bytes <= 6 * MIB
        for _ in range(30):
            assert await session.receive() == prompt
        assert connection._unread_bytes == 0


async def test_a_heartbeat_without_a_pause_is_refused() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.write(packed(dataclasses.replace(WELCOME, heartbeat_ms=0)))
        await peer.gone()

    async with router(script) as at:
        with pytest.raises(MalformedFrame, match="heartbeat_ms: expected at least 1"):
            await link_to(at)._open()


# --- what a router is owed ---


def test_an_outbox_answers_each_request_once_however_often_it_is_ended() -> None:
    outbox = Outbox()
    for _ in range(3):
        for request in range(MOST_ENDS - 1):
            outbox.failed(Failed(request, FailureKind.QUEUE_FULL, ""))
            outbox.cancelled(request, 0)
    assert not outbox.crowded
    outbox.failed(Failed(MOST_ENDS, FailureKind.QUEUE_FULL, ""))
    assert outbox.crowded
    frames = outbox.take()
    freed = [frame.request for frame in frames if isinstance(frame, Freed)]
    assert freed == list(range(MOST_ENDS - 1))
    assert not outbox.crowded
    assert [type(frame).__name__ for frame in outbox.take()] == ["Step"]


async def test_a_router_that_asks_on_and_takes_nothing_is_not_heard_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, inbox = 400, 16
    monkeypatch.setattr(outbox_module, "MOST_ENDS", 32)
    monkeypatch.setattr(sessions, "INBOX_FRAMES", inbox)
    taking = asyncio.Event()
    taking.set()
    send = Session.send

    async def slow(session: Session, *messages: Any) -> None:
        await taking.wait()
        await send(session, *messages)

    monkeypatch.setattr(Session, "send", slow)
    async with FakeRouter(tmp_path / "r") as fake, running(fake) as scene:
        talk = await joined(fake)
        taking.clear()
        for request in range(asked):
            talk.send(Cancel(request))
        (peer,) = scene.worker._peers.values()

        def owed() -> int:
            return len(peer.outbox._freed)

        async with asyncio.timeout(20):
            while not peer.outbox.crowded:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(500):
            await asyncio.sleep(0)
        assert owed() <= 32 + inbox + 1
        taking.set()
        await talk.until_freed(*range(asked))


async def test_a_flood_of_requests_holds_no_other_router_up(tmp_path: Path) -> None:
    """Each is refused by name once the queue is full, and the other router's answer comes meanwhile."""
    async with (
        FakeRouter(tmp_path / "loud", name="loud") as loud,
        FakeRouter(tmp_path / "quiet", name="quiet") as quiet,
        running(loud, quiet, sequences=2) as scene,
    ):
        flood, other = await joined(loud), await joined(quiet)
        gate = scene.model.gate = threading.Semaphore(0)
        many = scene.engine.config.max_waiting + 300
        for request in range(many):
            flood.send(make_submit(request, [1, 2, 3], max_tokens=2))
        other.send(make_submit(1, [4, 5, 6], max_tokens=2, priority=10))
        await flood.until(lambda: flood.answer(many - 1).failed is not None)
        refused = [flood.answer(request).failed for request in range(many)]
        kinds = {failed.kind for failed in refused if failed is not None}
        assert kinds == {"queue_full"}
        assert scene.engine.load.waiting <= scene.engine.config.max_waiting
        failed = other.answer(1).failed
        assert failed is None or failed.kind == "queue_full"
        for request in range(many):
            flood.send(Cancel(request))
        scene.model.gate = None
        gate.release(1000)
        other.send(make_submit(2, [4, 5, 6], max_tokens=2))
        await other.until_freed(2)
        assert other.answer(2).ids == true_greedy([4, 5, 6], 2)
        await flood.until(lambda: flood.answer(many - 1).freed is not None)
        scene.check()


async def test_prompts_are_not_hashed_for_requests_that_are_refused(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as fake, running(fake, sequences=1) as scene:
        talk = await joined(fake)
        scene.model.gate = threading.Semaphore(0)
        hashed = 0
        publishing = scene.engine.publishing
        names = publishing.names_of

        def count(sequence: Any) -> list[bytes]:
            nonlocal hashed
            hashed += 1
            return names(sequence)

        publishing.names_of = count  # type: ignore[method-assign]
        most = scene.engine.config.max_waiting
        for request in range(most + 50):
            talk.send(make_submit(request, [1, 2, 3], max_tokens=2))
        await talk.until(lambda: talk.answer(most + 49).failed is not None)
        assert hashed <= most + 1


# --- news of KV ---


@pytest.fixture
async def two(tmp_path: Path) -> AsyncGenerator[Pair]:
    async with pair(tmp_path) as workers:
        yield workers


async def test_tokens_to_go_on_with_are_fewer_than_the_context(two: Pair) -> None:
    context = two.decode.engine.context_tokens
    two.submit(1, list(range(20)), max_tokens=5)
    two.d.send(Continue(1, bytes(4 * (context + 1))))
    await two.d.until(lambda: two.d.answer(1).failed is not None)
    failed = two.d.answer(1).failed
    assert failed is not None
    assert (failed.kind, failed.message) == (
        "bad_resume",
        f"{context + 1} tokens, the context is {context}",
    )
    two.p.send(Cancel(1001))
    await two.p.until_freed(1001)


async def test_news_of_requests_that_are_not_here_leave_nothing(two: Pair) -> None:
    for request in range(300):
        two.d.send(Ticket(request, bytes(24)), Continue(request, bytes(400)), Cancel(request))
    await two.d.until_freed(*range(300))
    two.decode.check()


async def test_only_so_many_fetches_are_in_flight(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "MOST_FETCHES", 3)
    assert two.p.hello is not None
    for request in range(10):
        name = request.to_bytes(16, "little")
        kv_from = KvFrom("p", two.p.hello.transfer, 20_000, PULL_KEY)
        two.d.send(Fetch(request, kv_from, bytes(24), name, [-1], [0]))
    await two.d.until(lambda: all(two.d.answer(n).transferred for n in range(10)))
    errors = [two.d.answer(request).transferred[0].error for request in range(10)]
    assert "no_room" in errors
    assert set(errors) <= {"no_room", "refused"}
    two.decode.check()


async def test_a_router_that_loses_track_again_and_again_gets_a_snapshot_when_it_takes_one(
    tmp_path: Path,
) -> None:
    async with FakeRouter(tmp_path / "r") as fake, running(fake) as scene:
        talk = await joined(fake)
        for number in range(2000):
            talk.send(Resync(f"number {number}"))
        talk.send(make_submit(1, [1, 2, 3], max_tokens=2))
        await talk.until_freed(1)
        snapshots = sum(isinstance(frame, Snapshot) for frame in talk.seen)
        assert 1 <= snapshots <= 2001
        scene.check()

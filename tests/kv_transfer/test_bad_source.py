"""A client whose source is bad: silent, gone, or wrong, at every step. It notices, in time, and nothing counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.kv_transfer.backends.base import Limits, LinkBroken, TransferError
from headrace.kv_transfer.backends.shm import SCHEMA, ShmPart, ShmPool
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.messages import (
    Closed,
    Data,
    KvRefuse,
    KvRefuseReason,
    KvWelcome,
    Ready,
    Release,
    Started,
)
from headrace.kv_transfer.peers.stream import Stream
from headrace_kernels.ops import KvPool
from helpers.kv.peers import (
    BACKENDS,
    HASTY,
    LAYOUT,
    MEMBERS,
    PATIENT,
    QUICK,
    Backend,
    SourceScript,
    forever,
    listening,
)
from helpers.kv.pools import all_bytes, make_pool, overwrite
from helpers.kv.pull_keys import bound

TICKET = bytes(24)
WANTED = [(0, 1), (1, 2), (2, 3)]
STEPS = (
    "accepted",
    "challenged",
    "welcomed",
    "pulled",
    "started",
    "half moved",
    "moved",
    "released",
)


async def behave_until(script: SourceScript, step: str) -> None:
    """Everything up to `step`, rightly."""
    if step == "accepted":
        return
    if step == "challenged":
        await script.challenge()
        return
    await script.welcome()
    if step == "welcomed":
        return
    pull = await script.pull()
    if step == "pulled":
        return
    await script.start(pull)
    if step == "started":
        return
    for group in range(3):
        if step == "half moved" and group == 2:
            if script.backend == "tcp":  # the header, and no bytes
                await script.stream.send([Data(pull.pull, group, 0, 3, 0)])
            return
        await script.migration(pull, group)
    if step == "moved":
        return
    await script.receive(Release)


def client_of(ours: KvPool, limits: Limits = QUICK) -> TransferClient:
    return TransferClient(ours, LAYOUT, members=MEMBERS, limits=limits)


async def pull_from(
    backend: Backend,
    serve: Callable[[SourceScript], Awaitable[None]],
    *,
    timeout_s: float = 10,
    limits: Limits = QUICK,
) -> TransferError:
    """The error of a pull from this source."""
    theirs, ours = make_pool(seed=1), make_pool(seed=2)

    async def run(stream: Stream) -> None:
        await serve(SourceScript(stream, theirs, backend))

    client = client_of(ours, limits)
    async with listening(backend, run) as endpoints:
        with pytest.raises(TransferError) as caught:
            await client.pull(endpoints, bound(TICKET), WANTED, timeout_s=timeout_s)
        await client.close()
    assert_untouched_beside(ours)
    return caught.value


def assert_untouched_beside(ours: KvPool) -> None:
    """Only wanted blocks may have changed."""
    fresh = all_bytes(make_pool(seed=2))
    now = all_bytes(ours)
    size = ours.block_bytes
    assert now[:size] == fresh[:size]
    assert now[4 * size :] == fresh[4 * size :]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_source_that_dies_is_lost(backend: Backend, step: str) -> None:
    error = await pull_from(backend, lambda script: behave_until(script, step))
    assert error.kind == "lost"
    assert error.backend == (None if step in STEPS[:2] else backend)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_source_that_falls_silent_is_lost_after_three_heartbeats(
    backend: Backend, step: str
) -> None:
    async def serve(script: SourceScript) -> None:
        await behave_until(script, step)
        await asyncio.Event().wait()  # half open: nothing is read, nothing said

    limits = HASTY if step in STEPS[:2] else QUICK
    error = await pull_from(backend, serve, timeout_s=3600, limits=limits)  # nothing else ends it
    assert error.kind == "lost"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_pull_ends_at_its_time_out(backend: Backend, step: str) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time

    async def serve(script: SourceScript) -> None:
        await behave_until(script, step)
        if step == "welcomed":
            await script.pull()  # it knows that it is
        loop.time = lambda: now() + 31  # type: ignore[method-assign]
        await asyncio.Event().wait()

    error = await pull_from(backend, serve, timeout_s=30, limits=PATIENT)
    assert error.kind == "timeout"
    assert error.backend == (None if step in STEPS[:2] else backend)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_cancelled_pull_writes_nothing_more(backend: Backend, step: str) -> None:
    theirs, ours = make_pool(seed=1), make_pool()
    there = asyncio.Event()
    go_on = asyncio.Event()

    async def serve(stream: Stream) -> None:
        script = SourceScript(stream, theirs, backend)
        await behave_until(script, step)
        there.set()
        await go_on.wait()
        if step == "half moved" and backend == "tcp":
            await stream._send_all([memoryview(bytes(3 * 192))])  # the bytes it has announced
        await forever(stream)

    async with listening(backend, serve) as endpoints:
        client = client_of(ours)
        pull = asyncio.create_task(client.pull(endpoints, bound(TICKET), WANTED, timeout_s=10))
        await there.wait()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        overwrite(ours, 0xAA)  # the blocks are somebody else's now
        go_on.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await client.close()
    assert all_bytes(ours) == bytes([0xAA]) * len(all_bytes(ours))


async def test_after_a_cancelled_pull_the_connection_goes_on() -> None:
    """What still comes for it is read and forgotten."""
    theirs, ours = make_pool(seed=1), make_pool()
    started = asyncio.Event()

    async def serve(stream: Stream) -> None:
        script = SourceScript(stream, theirs, "tcp")
        await script.welcome()
        first = await script.pull()
        await script.start(first)
        started.set()
        second = await script.pull()
        await script.migration(first, 0, crc_off_by=1)
        await script.start(second)
        for group in range(3):
            await script.migration(second, group)
        await script.receive(Release)
        await stream.send([Closed(second.pull, True)])
        await forever(stream)

    async with listening("tcp", serve) as endpoints:
        client = client_of(ours)
        pull = asyncio.create_task(client.pull(endpoints, bound(TICKET), [(5, 5)], timeout_s=10))
        await started.wait()
        pull.cancel()
        await asyncio.wait([pull])
        await client.pull(endpoints, bound(TICKET), WANTED, timeout_s=10)
        await client.close()
    assert all_bytes(ours)[5 * ours.block_bytes :] == bytes(11 * ours.block_bytes)


async def test_bytes_that_do_not_match_their_checksum_do_not_count() -> None:
    aborted = asyncio.Event()

    async def serve(script: SourceScript) -> None:
        await behave_until(script, "pulled")
        # behave_until took the pull: its number is 0
        await script.stream.send([Started(0, bytes(12))])
        await script.stream.send([Data(0, 0, 0, 3, 1)], [memoryview(bytes(3 * 192))])
        aborted.set()
        await forever(script.stream)

    error = await pull_from("tcp", serve)
    assert (error.kind, error.backend) == ("checksum", "tcp")
    assert aborted.is_set()


WRONG: dict[str, Callable[[SourceScript], Awaitable[None]]] = {}


def wrong(serve: Callable[[SourceScript], Awaitable[None]]) -> None:
    WRONG[serve.__name__] = serve


@wrong
async def no_message(script: SourceScript) -> None:
    await script.stream._send_all([memoryview(b"\x03\0\0\0abc")])


@wrong
async def oversized_message(script: SourceScript) -> None:
    await script.stream._send_all([memoryview(b"\xff\xff\xff\x7f")])


@wrong
async def message_of_no_bytes(script: SourceScript) -> None:
    await script.stream._send_all([memoryview(bytes(4))])


@wrong
async def another_welcome(script: SourceScript) -> None:
    await script.stream.send([KvWelcome(script.backend, b"", script.proof)])


@wrong
async def group_that_is_none(script: SourceScript) -> None:
    await script.stream.send([Ready(0, 3, 0, 1)])


@wrong
async def more_blocks_than_wanted(script: SourceScript) -> None:
    await script.stream.send([Ready(0, 0, 0, 4)])


@wrong
async def blocks_left_out(script: SourceScript) -> None:
    await script.stream.send([Ready(0, 0, 1, 2)])


@wrong
async def the_same_twice(script: SourceScript) -> None:
    await script.stream.send([Ready(0, 0, 0, 1), Ready(0, 0, 0, 1)])


@wrong
async def started_twice(script: SourceScript) -> None:
    await script.stream.send([Started(0, bytes(12))])


@wrong
async def data_where_none_belongs(script: SourceScript) -> None:
    await script.stream.send([Data(0, 9, 0, 1, 0)])


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_source_that_breaks_the_rules_is_given_up(backend: Backend, name: str) -> None:
    async def serve(script: SourceScript) -> None:
        await behave_until(script, "started")
        await WRONG[name](script)
        with pytest.raises(LinkBroken):  # the client hangs up
            await forever(script.stream)

    assert (await pull_from(backend, serve)).kind == "lost"


@pytest.mark.parametrize("blocks", [b"", bytes(8), b"\xff" * 12])
async def test_block_numbers_that_cannot_be_are_not_read_from(blocks: bytes) -> None:
    async def serve(script: SourceScript) -> None:
        await behave_until(script, "pulled")
        await script.stream.send([Started(0, blocks)])
        await forever(script.stream)

    assert (await pull_from("shm", serve)).kind == "lost"


@pytest.mark.parametrize("about", [b"", b"\x00", b"\x92\x01\xff"])
async def test_a_pool_that_is_no_description_is_not_mapped(about: bytes) -> None:
    error = await pull_from("shm", lambda script: script.welcome(about))
    assert error.kind == "lost"


async def test_a_pool_larger_than_its_memory_is_not_read_from() -> None:

    about = SCHEMA.encode(ShmPool(16, [[ShmPart(1 << 40, 0, 192)]] * 3))
    error = await pull_from("shm", lambda script: script.welcome(about))
    assert error.kind == "lost"
    assert "larger than its memory" in error.message


@pytest.mark.parametrize("groups", [[], [[192]], [[193]] * 3, [[96, 96]] * 3])
async def test_a_pool_of_other_regions_than_ours_is_not_read_from(groups: list[list[int]]) -> None:
    """More bytes in a block than we have, and they would be written into the next one."""

    about = SCHEMA.encode(ShmPool(1, [[ShmPart(0, 0, size) for size in group] for group in groups]))
    error = await pull_from("shm", lambda script: script.welcome(about))
    assert (error.kind, "other regions" in error.message) == ("lost", True)


@pytest.mark.parametrize(
    ("refuse", "kind"),
    [
        (KvRefuse(KvRefuseReason.VERSION, None, "2", "1"), "refused"),
        (KvRefuse(KvRefuseReason.LAYOUT, None, "a", "b"), "layout"),
        (KvRefuse(KvRefuseReason.PROOF, None, "0", "1"), "lost"),
        (KvRefuse(KvRefuseReason.LINKS, None, "1 at most", "one more"), "lost"),
    ],
)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_refusal_says_both_values(
    backend: Backend, early: bool, refuse: KvRefuse, kind: str
) -> None:
    async def serve(script: SourceScript) -> None:
        await (script.stream.receive() if early else script.challenge())
        await script.stream.send([refuse])

    error = await pull_from(backend, serve)
    assert error.kind == kind
    assert refuse.ours in error.message
    assert refuse.yours in error.message


async def test_a_closed_client_cancels_its_pulls() -> None:
    theirs, ours = make_pool(), make_pool()
    there = asyncio.Event()

    async def serve(stream: Stream) -> None:
        await behave_until(SourceScript(stream, theirs, "tcp"), "started")
        there.set()
        await forever(stream)

    async with listening("tcp", serve) as endpoints:
        client = client_of(ours)
        pull = asyncio.create_task(client.pull(endpoints, bound(TICKET), WANTED, timeout_s=10))
        await there.wait()
        await client.close()
        with pytest.raises(TransferError, match="cancelled"):
            await pull
        with pytest.raises(TransferError, match="cancelled"):
            await client.pull(endpoints, bound(TICKET), WANTED, timeout_s=10)


async def test_a_ticket_of_the_wrong_size_is_refused_at_home() -> None:
    client = client_of(make_pool())
    with pytest.raises(TransferError, match="refused"):
        await client.pull(["tcp:127.0.0.1:1"], bound(b"short"), WANTED, timeout_s=1)
    await client.close()


async def test_nobody_there_is_lost_and_says_where() -> None:
    client = client_of(make_pool())
    with pytest.raises(TransferError, match="headrace-nobody"):
        await client.pull(["shm:headrace-nobody"], bound(TICKET), WANTED, timeout_s=1)
    with pytest.raises(TransferError, match="no back-end in common"):
        await client.pull(["carrier-pigeon:1"], bound(TICKET), WANTED, timeout_s=1)
    await client.close()

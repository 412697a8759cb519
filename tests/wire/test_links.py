"""The set of a worker's links: as addresses come and go, and as routers send the worker away for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from headrace import _core
from headrace.errors import HeldOff, LinkLost, Refused
from headrace.wire import links
from headrace.wire.discovery import Report, RouterAddress
from headrace.wire.frames import PROTOCOL, Capacity, Fingerprints, Hello, Refuse, RefuseReason
from headrace.wire.link import Link, LinkConfig, Session, _refused
from headrace.wire.links import Links
from helpers.worker.fake_router import TIMEOUT_S, Conversation, FakeRouter
from helpers.worker.frames import refusal

HELLO = Hello(
    protocol=PROTOCOL,
    worker="w",
    epoch=7,
    role="both",
    model="toy",
    fingerprints=Fingerprints("w", "t", "c", "kv", _core.HASH_SCHEME, 4),
    capacity=Capacity(blocks=64, sequences=4, batched_tokens=16, waiting=4),
    context_tokens=64,
)


class Scene:
    """Links that run, a source that says what the test wants, and sessions that last until they break."""

    def __init__(self) -> None:
        self.report: Report = lambda _: None
        self.dials: list[str] = []
        self.ready = asyncio.Event()
        self.talks: asyncio.Queue[str] = asyncio.Queue()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.links = Links([self], self._dial)
        self.task = asyncio.create_task(self.links.run(self._talk))

    async def run(self, report: Report) -> None:
        self.report = report
        self.ready.set()
        await asyncio.Event().wait()

    def _dial(self, address: RouterAddress, joined: Callable[[str], bool]) -> Link:
        self.dials.append(address.text)
        quick = LinkConfig(address=address.text, first_backoff_s=0.001, max_backoff_s=0.002)
        return Link(quick, lambda: HELLO, joined=joined)

    async def _talk(self, session: Session) -> None:
        self.talks.put_nowait(session.router)
        with contextlib.suppress(LinkLost):
            async with session:
                while True:
                    await session.receive()
        self.ends.put_nowait(session.router)

    async def names(self, *routers: FakeRouter | str) -> None:
        await self.ready.wait()
        self.report([RouterAddress(r if isinstance(r, str) else r.address) for r in routers])

    async def joined(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.talks.get()


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[Scene]:
    scene = Scene()
    try:
        yield scene
    finally:
        scene.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await scene.task


async def test_links_come_with_addresses_and_works_on_when_they_go(tmp_path: Path) -> None:
    async with (
        FakeRouter(tmp_path / "a", name="a") as one,
        FakeRouter(tmp_path / "b", name="b") as two,
        running() as scene,
    ):
        await scene.names(one)
        first = await one.worker()
        assert await scene.joined() == "a"
        await scene.names(one, two)
        await two.worker()
        assert await scene.joined() == "b"
        assert sorted(scene.links.routers) == ["a", "b"]
        await scene.names(two)  # a's address is gone, its link is not
        assert sorted(scene.links.routers) == ["a", "b"]
        first.hang_up()
        assert await scene.ends.get() == "a"
        assert scene.links.routers == ["b"]
        await scene.names(two, one)
        await one.worker()
        assert await scene.joined() == "a"
        assert scene.dials.count(one.address) == 2, "in between nobody dialled"


async def test_an_address_that_comes_back_in_time_keeps_its_link(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        talk = await one.worker()
        await scene.joined()
        await scene.names()
        await scene.names(one)
        talk.hang_up()
        await one.worker()  # it dials again
        assert await scene.joined() == "a"
        assert scene.dials == [one.address], "by the same link"


async def test_an_address_that_nobody_answers_is_let_go(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(f"unix:{tmp_path}/nobody", one)
        await one.worker()
        await scene.joined()
        await scene.names(one)
        assert len(scene.links._ways) == 1
        scene.links.stop()
        one.hang_up_all()
        async with asyncio.timeout(TIMEOUT_S):
            await scene.task


async def test_two_ways_to_one_router_are_one_link(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        (tmp_path / "b").symlink_to(tmp_path / "a")
        await scene.names(one)
        talk = await one.worker()
        assert await scene.joined() == "a"
        await scene.names(one, f"unix:{tmp_path}/b")
        second = await one.worker()
        await second.until_closed()
        assert scene.links.routers == ["a"]
        assert scene.talks.empty()
        talk.hang_up()  # both ways are tried again, and one of them stays
        for _ in range(2):
            await one.worker()
        assert await scene.joined() == "a"
        assert scene.talks.empty()


async def refused(router: FakeRouter, refuse: Refuse) -> None:
    talk = await router.accepted()
    await talk.receive()
    talk.send(refuse)
    await talk.until_closed()


async def test_a_router_that_holds_a_worker_off_is_dialled_later(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        await refused(one, refusal(RefuseReason.CIRCUIT, 10))
        await one.worker()
        assert await scene.joined() == "a"


async def test_no_router_holds_a_worker_off_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LONGEST_HOLD_S", 0.01)
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        await refused(one, refusal(RefuseReason.CIRCUIT, 2**32 - 1))
        await one.worker()
        assert await scene.joined() == "a"


async def test_a_name_that_is_taken_is_tried_again_and_is_no_end(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        for _ in range(3):
            await refused(one, refusal(RefuseReason.NAME_TAKEN, 10))
        await one.worker()
        assert await scene.joined() == "a"


@pytest.mark.parametrize("reason", [RefuseReason.CIRCUIT, RefuseReason.NAME_TAKEN])
def test_who_is_held_off_is_told_for_how_long(reason: RefuseReason) -> None:
    error = _refused(refusal(reason, 2500))
    assert isinstance(error, HeldOff)
    assert error.retry_after_s == 2.5


@pytest.mark.parametrize(
    "reason", [reason for reason in RefuseReason if reason != RefuseReason.ALREADY_JOINED]
)
def test_every_other_refusal_is_for_good(reason: RefuseReason) -> None:
    if not reason.says_when:
        assert type(_refused(refusal(reason))) is Refused


async def test_held_off_after_the_welcome_is_no_end_either(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        talk = await one.worker()
        await scene.joined()
        talk.send(refusal(RefuseReason.CIRCUIT, 10))
        await talk.until_closed()
        await one.worker()
        assert await scene.joined() == "a"


async def test_a_router_that_has_not_noticed_the_end_of_a_link_is_dialled_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LOST_WAY_S", 0.01)
    async with FakeRouter(tmp_path / "a", name="a") as one, running() as scene:
        await scene.names(one)
        await refused(one, refusal(RefuseReason.ALREADY_JOINED, router="router-1"))
        await one.worker()
        assert await scene.joined() == "a"


async def test_when_all_routers_refuse_for_good_that_is_the_end(tmp_path: Path) -> None:
    no = refusal(RefuseReason.SUPERSEDED, differs=("epoch", "8", "7"))
    async with (
        FakeRouter(tmp_path / "a", name="a") as one,
        FakeRouter(tmp_path / "b", name="b") as two,
        running() as scene,
    ):
        await scene.names(one, two)
        await refused(one, no)
        talk: Conversation = await two.worker()
        assert await scene.joined() == "b"
        talk.hang_up()
        await refused(two, no)
        with pytest.raises(BaseExceptionGroup) as caught:
            await scene.task
        assert caught.group_contains(Refused)

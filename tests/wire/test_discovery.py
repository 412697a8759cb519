"""Where routers are: what the sources say, together and one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator

import pytest

from headrace.settings.worker import split_routers
from headrace.wire import discovery
from headrace.wire.discovery import (
    MAX_ROUTERS,
    Change,
    Discovery,
    DnsName,
    EtcdPrefix,
    Fixed,
    Report,
    RouterAddress,
    parse_sources,
)

TIMEOUT_S = 20.0


class Told:
    """A source that says what the test wants."""

    def __init__(self) -> None:
        self.report: Report = lambda _: None
        self.ready = asyncio.Event()

    async def run(self, report: Report) -> None:
        self.report = report
        self.ready.set()
        await asyncio.Event().wait()

    def says(self, *texts: str) -> None:
        self.report([RouterAddress(text) for text in texts])


class Changes:
    """What discovery told."""

    def __init__(self) -> None:
        self.all: asyncio.Queue[Change] = asyncio.Queue()

    async def next(self) -> tuple[list[str], list[str]]:
        async with asyncio.timeout(TIMEOUT_S):
            change = await self.all.get()
        return sorted(address.text for address in change.added), sorted(change.removed)

    @contextlib.asynccontextmanager
    async def of(self, *sources: discovery.RouterSource) -> AsyncGenerator[None]:
        task = asyncio.create_task(Discovery(sources, self.all.put_nowait).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_an_address_counts_once_whoever_names_it() -> None:
    one, two, changes = Told(), Told(), Changes()
    async with changes.of(Fixed(["c:1"]), one, two):
        assert await changes.next() == (["c:1"], [])
        await one.ready.wait()
        await two.ready.wait()
        one.says("a:1", "b:1")
        assert await changes.next() == (["a:1", "b:1"], [])
        two.says("a:1", "c:1")
        one.says("b:1")  # the other one still names a
        one.says("b:1")
        two.says("c:1")
        assert await changes.next() == ([], ["a:1"])
        two.says()
        one.says()
        assert await changes.next() == ([], ["b:1"])
        assert changes.all.empty()


class Zone:
    """A resolver with answers to come; the last one stays."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def resolve(self, name: str, port: int) -> list[str]:
        assert (name, port) == ("routers.test", 8001)
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, TimeoutError):
            await asyncio.Event().wait()  # never: the time-out is the source's own
        if isinstance(answer, Exception):
            raise answer
        return answer

    def source(self) -> DnsName:
        rng = random.Random(1)
        return DnsName(
            "routers.test", 8001, resolve=self.resolve, refresh_s=0.001, look_up_s=0.01, rng=rng
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(discovery, "LONGEST_RETRY_S", 0.002)


async def test_a_name_is_looked_up_again_and_again() -> None:
    zone = Zone(["10.0.0.1", "fd00::1"], ["10.0.0.1"], ["10.0.0.1", "10.0.0.2"])
    changes = Changes()
    async with changes.of(zone.source()):
        assert await changes.next() == (["10.0.0.1:8001", "[fd00::1]:8001"], [])
        assert await changes.next() == ([], ["[fd00::1]:8001"])
        assert await changes.next() == (["10.0.0.2:8001"], [])


@pytest.mark.parametrize(
    "trouble", [OSError("no such name"), TimeoutError(), UnicodeError("label too long")], ids=repr
)
async def test_where_a_name_cannot_be_looked_up_what_is_known_stays(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    zone = Zone(["10.0.0.1"], trouble, trouble, ["10.0.0.2"])
    changes = Changes()
    async with changes.of(zone.source()):
        assert await changes.next() == (["10.0.0.1:8001"], [])
        assert await changes.next() == (["10.0.0.2:8001"], ["10.0.0.1:8001"])
    assert zone.asked >= 4
    assert "discovery dns_failed: routers.test" in caplog.text
    assert "the 1 addresses known stay" in caplog.text


async def test_a_name_with_too_many_addresses_is_cut_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = Changes()
    async with changes.of(Zone([f"10.0.{i // 256}.{i % 256}" for i in range(1000)]).source()):
        added, _ = await changes.next()
    assert len(added) == MAX_ROUTERS
    assert "discovery too_many" in caplog.text


async def test_the_certificate_is_for_the_name_that_was_looked_up() -> None:
    changes = Changes()
    async with changes.of(Zone(["10.0.0.1"]).source()):
        change = await changes.all.get()
    assert change.added == (RouterAddress("10.0.0.1:8001", tls_name="routers.test"),)


async def test_the_systems_resolver_knows_this_machine() -> None:
    found = await discovery.resolve("localhost", 8001)
    assert "127.0.0.1" in found or "::1" in found
    assert len(found) == len(set(found))
    with pytest.raises(OSError):  # noqa: PT011
        await discovery.resolve("no-such-name.invalid", 8001)


def test_sources_are_read_from_one_argument() -> None:
    specs = split_routers(
        "a:1, unix:/run/r ,dns:n.test:8001,etcd:e1:2379,[::1]:2379/head/race/,b:2"
    )
    assert specs == (
        *("a:1", "unix:/run/r", "dns:n.test:8001"),
        "etcd:e1:2379,[::1]:2379/head/race/",
        "b:2",
    )
    assert [type(source) for source in parse_sources(specs)] == [Fixed, DnsName, EtcdPrefix]


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "host",
            "dns:",
            "dns:name",
            "dns:unix:/x",
            "dns:name:0",
            "etcd:h:1",
            "etcd:h:1/",
            "etcd:/p",
        ),
        *("etcd:h/p", "etcd:unix:/x/p", "etcd:h:1,/p", "http://h:1"),
    ],
)
def test_what_names_no_router_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_sources(split_routers(spec))

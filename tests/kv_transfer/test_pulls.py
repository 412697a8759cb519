"""Pulls in their order and to their end; news for a router."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from headrace.engine.sequence import Key
from headrace.kv_transfer.backends.base import TransferError
from headrace.kv_transfer.migration import Fetches
from headrace.kv_transfer.pulls import MAX_PULLS, MAX_PULLS_OF_SOURCE, Pull, Puller
from headrace.wire.frames import (
    Fetch,
    Freed,
    KvFrom,
    KvReady,
    Offer,
    Step,
    TransferBackend,
    TransferFailure,
    Transferred,
)
from headrace.wire.link import reachable
from headrace.worker.outbox import MOST_REPORTS, Outbox
from helpers.engine.toy import ToyModel
from helpers.engine.toy_engine import engine_on
from helpers.kv.pull_keys import PULL_KEY
from helpers.kv.pulling import DONE, SOURCE, FakeClient
from helpers.worker.fake_router import TIMEOUT_S


class Bench:
    """A puller and what became of its pulls."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.woken = asyncio.Event()
        self.puller = Puller(cast("Any", self.client), self.woken.set)
        self.settled: list[Transferred] = []

    def start(self, number: int, source: KvFrom = SOURCE) -> Pull:
        pull = Pull(Key(0, number), source, str(number).encode(), [(0, 0)], self._settle)
        self.puller.start(pull)
        return pull

    def _settle(self, key: Key, report: Transferred) -> None:
        ticket = str(key.request).encode()
        assert ticket not in self.client.writing, "something may still write to its blocks"
        assert report.request == key.request
        self.settled.append(report)

    async def until_settled(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.settled) < count:
                await self.woken.wait()
                self.woken.clear()
                self.puller.settle()

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.client.started) < count:
                await self.client.another.wait()
                self.client.another.clear()


async def test_a_pull_that_is_done_is_settled_once_with_its_report() -> None:
    bench = Bench()
    bench.start(1)
    await bench.until_started(1)
    assert not bench.puller.idle
    bench.client.ends[b"1"].set_result(DONE)
    await bench.until_settled(1)
    bench.puller.settle()
    (report,) = bench.settled
    assert report == Transferred(1, "p", TransferBackend.SHM, 1, 64, 0.5, None)
    assert bench.puller.idle


async def test_only_so_many_pull_from_a_source_at_a_time_and_the_rest_in_order() -> None:
    bench = Bench()
    most = MAX_PULLS_OF_SOURCE
    pulls = [bench.start(number) for number in range(most + 3)]
    await bench.until_started(most)
    bench.puller.stop(pulls[most], TransferFailure.TIMEOUT)  # its turn has not come
    await bench.until_settled(1)
    assert bench.settled[0].error == "no_room", "its source is not to blame"
    bench.client.ends[b"5"].set_result(DONE)
    await bench.until_started(most + 1)
    assert bench.client.started[-1] == str(most + 1).encode()
    bench.client.stops.set()
    bench.puller.stop_all(TransferFailure.CANCELLED)
    await bench.until_settled(most + 3)
    assert sorted(report.request for report in bench.settled) == [*range(most + 3)]
    assert bench.puller.idle


async def test_a_source_that_gives_nothing_does_not_hold_back_another_one() -> None:
    bench = Bench()
    for number in range(3 * MAX_PULLS_OF_SOURCE):
        bench.start(number)
    bench.start(1000, KvFrom("q", ["tcp:127.0.0.1:2"], 1000, PULL_KEY))
    await bench.until_started(MAX_PULLS_OF_SOURCE + 1)
    bench.client.ends[b"1000"].set_result(DONE)
    await bench.until_settled(1)
    assert bench.settled[0] == Transferred(1000, "q", TransferBackend.SHM, 1, 64, 0.5, None)
    bench.client.stops.set()
    bench.puller.stop_all(TransferFailure.CANCELLED)
    await bench.until_settled(3 * MAX_PULLS_OF_SOURCE + 1)
    assert bench.puller.idle


async def test_only_so_many_pull_at_a_time_from_all_sources() -> None:
    bench = Bench()
    for number in range(MAX_PULLS + 2):
        bench.start(number, KvFrom("p", [f"tcp:127.0.0.1:{number % 100}"], 1000, PULL_KEY))
    await bench.until_started(MAX_PULLS)
    bench.client.ends[b"5"].set_result(DONE)
    await bench.until_started(MAX_PULLS + 1)
    assert bench.client.started[-1] == str(MAX_PULLS).encode()
    bench.client.stops.set()
    bench.puller.stop_all(TransferFailure.CANCELLED)
    await bench.until_settled(MAX_PULLS + 2)
    assert bench.puller.idle


async def test_a_pull_that_is_stopped_ends_when_nothing_writes_any_more() -> None:
    bench = Bench()
    pull = bench.start(1)
    await bench.until_started(1)
    bench.puller.stop(pull, TransferFailure.TIMEOUT)
    bench.puller.stop(pull, TransferFailure.CANCELLED)  # the first word counts
    for _ in range(10):
        await asyncio.sleep(0)
    bench.puller.settle()
    assert not bench.settled
    bench.client.stops.set()
    await bench.until_settled(1)
    assert [report.error for report in bench.settled] == ["timeout"]


async def test_a_pull_stopped_before_its_task_began_ends_too() -> None:
    bench = Bench()
    pull = bench.start(1)
    bench.puller.stop(pull, TransferFailure.CANCELLED)
    await bench.until_settled(1)
    assert [report.error for report in bench.settled] == ["cancelled"]
    assert bench.client.started == []
    bench.puller.stop(pull, TransferFailure.TIMEOUT)
    assert bench.puller.idle


async def test_a_fetch_that_is_given_up_is_due_no_more_while_it_stops() -> None:
    """Or the worker's loop, which waits for what is due, would turn and turn until then."""
    bench = Bench()
    engine = engine_on(ToyModel(), blocks=8)
    told: list[object] = []
    fetches = Fetches(engine, bench.puller, lambda _, news: told.append(news))
    fetches.fetch(Key(0, 1), Fetch(1, SOURCE, b"1", bytes(16), [-1], [0]), now_s=5.0)
    assert fetches.next_deadline_s == 6.0
    await bench.client.another.wait()
    fetches.settle(6.0)
    assert fetches.next_deadline_s == math.inf
    assert bench.client.writing
    bench.client.stops.set()
    async with asyncio.timeout(TIMEOUT_S):
        await bench.woken.wait()
    bench.puller.settle()
    assert [news.error for news in told if isinstance(news, Transferred)] == ["timeout"]
    assert engine.pool.used == 0


async def test_failures_are_reported_by_name_even_those_nobody_thought_of() -> None:
    bench = Bench()
    bench.start(1)
    bench.start(2)
    await bench.until_started(2)
    bench.client.ends[b"1"].set_exception(
        TransferError(TransferFailure.CHECKSUM, "bits fell over", TransferBackend.TCP)
    )
    bench.client.ends[b"2"].set_exception(RuntimeError("a bug"))
    await bench.until_settled(2)
    reports = {report.request: report for report in bench.settled}
    assert (reports[1].error, reports[1].backend) == ("checksum", "tcp")
    assert reports[2].error == "lost"
    assert all(report.blocks == report.bytes == 0 for report in reports.values())


@pytest.mark.parametrize(
    ("endpoint", "host", "told"),
    [
        ("tcp:0.0.0.0:9000", "10.1.2.3", "tcp:10.1.2.3:9000"),
        ("nixl:[::]:9000", "fe80::1", "nixl:[fe80::1]:9000"),
        ("tcp:[::]:9000", "10.1.2.3", "tcp:10.1.2.3:9000"),
        ("tcp:127.0.0.1:9000", "10.1.2.3", "tcp:127.0.0.1:9000"),
        ("shm:headrace-00", "10.1.2.3", "shm:headrace-00"),
        ("", "10.1.2.3", ""),
    ],
)
def test_an_address_of_all_is_told_as_the_one_that_dials(
    endpoint: str, host: str, told: str
) -> None:
    assert reachable(endpoint, host) == told


def test_news_leave_in_order_and_no_ticket_outlives_its_request() -> None:
    outbox = Outbox()
    outbox.tell(KvReady(1, b"t", 5))
    outbox.tell(KvReady(2, b"u", 5))
    outbox.cancelled(2, 3)
    outbox.tell(Transferred(3, "p", TransferBackend.SHM, 1, 2, 3.0, None))
    outbox.tell(Freed(3, 4))
    outbox.tell(Offer(b"", b"", [], [], 0))
    kinds = [type(frame) for frame in outbox.take()]
    assert kinds == [KvReady, Step, Transferred, Freed, Freed, Offer]
    assert [type(frame) for frame in outbox.take()] == [Step]


def test_a_cancelled_request_whose_blocks_are_written_to_is_freed_later() -> None:
    outbox = Outbox()
    outbox.cancelled(1, None)
    assert [type(frame) for frame in outbox.take()] == [Step]
    outbox.tell(Freed(1, 7))
    assert Freed(1, 7) in outbox.take()


def test_reports_for_a_router_that_takes_nothing_are_bounded() -> None:
    outbox = Outbox()
    for request in range(MOST_REPORTS + 5):
        outbox.tell(Transferred(request, "p", TransferBackend.SHM, 1, 2, 3.0, None))
    reports = [frame for frame in outbox.take() if isinstance(frame, Transferred)]
    assert [report.request for report in reports] == list(range(5, MOST_REPORTS + 5))

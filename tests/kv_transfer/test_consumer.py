"""Between the pulls of an engine and their movers: each is started, stopped and reported once, whatever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest

from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Key
from headrace.kv_transfer.backends.base import TransferError
from headrace.kv_transfer.consumer import Consumer
from headrace.kv_transfer.producer import News
from headrace.kv_transfer.pulls import MAX_PULLS_OF_SOURCE, Puller
from headrace.wire.frames import Freed, TransferBackend, TransferFailure, Transferred
from helpers.engine.legs import PROMPT, D, make_engine, run, truth
from helpers.engine.pair import KV_FROM
from helpers.engine.toy import make_submit, pack
from helpers.kv.pulling import DONE, FakeClient
from helpers.worker.fake_router import TIMEOUT_S


class Desk:
    """A decode engine, its consumer, and a client that pulls nothing."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.engine = make_engine(blocks=1000)
        self.woken = asyncio.Event()
        self.puller = Puller(cast("Any", self.client), self.woken.set)
        self.told: list[News] = []
        self.consumer = Consumer(self.engine, self.puller, lambda _, news: self.told.append(news))

    def submit(self, number: int = D.request, *, ticket: bool = True) -> Key:
        key = Key(0, number)
        self.engine.submit(replace(make_submit(number, PROMPT), kv_from=KV_FROM))
        if ticket:
            self.engine.kv_imports.ticket(key, str(number).encode())
            self.engine.step()
        return key

    def settle(self) -> None:
        """A turn of the worker's loop."""
        self.puller.settle()
        self.consumer.settle()
        self.engine.check()

    async def pulling(self, number: int = D.request) -> Key:
        """A request whose pull runs."""
        key = self.submit(number)
        self.settle()
        async with asyncio.timeout(TIMEOUT_S):
            while str(number).encode() not in self.client.ends:
                await self.client.another.wait()
                self.client.another.clear()
        return key

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.told) < count:
                await self.woken.wait()
                self.woken.clear()
                self.settle()

    def end(self, number: int = D.request) -> None:
        self.client.ends[str(number).encode()].set_result(DONE)

    @property
    def outcomes(self) -> list[str | None]:
        return [news.error for news in self.told if isinstance(news, Transferred)]

    @property
    def freed(self) -> list[News]:
        return [news for news in self.told if isinstance(news, Freed)]

    def over(self) -> None:
        """Nothing is left."""
        self.settle()
        assert self.engine.empty and self.puller.idle
        self.engine.check_idle()


@pytest.fixture
async def desk() -> AsyncGenerator[Desk]:
    desk = Desk()
    yield desk
    desk.client.stops.set()  # or what a failed test leaves would never end


async def test_a_pull_is_started_and_reported_once(desk: Desk) -> None:
    key = await desk.pulling()
    desk.settle()
    assert desk.client.started == [b"2"]
    desk.end()
    await desk.until_told(1)
    assert desk.told == [Transferred(key.request, "p", TransferBackend.SHM, 1, 64, 0.5, None)]
    desk.consumer.go_on(key, pack(truth()[:1]), 0.0)
    assert not desk.engine.idle
    assert desk.engine.cancel(key) == 3
    desk.over()
    assert len(desk.told) == 1


async def test_a_cancel_in_the_pull_frees_the_blocks_when_the_mover_has_stopped(desk: Desk) -> None:
    key = await desk.pulling()
    assert desk.engine.cancel(key) is None
    desk.settle()
    for _ in range(10):
        await asyncio.sleep(0)
        desk.settle()
    assert (desk.engine.pool.used, desk.told) == (3, [])
    desk.client.stops.set()
    await desk.until_told(2)
    assert desk.outcomes == ["cancelled"]
    assert desk.freed == [Freed(key.request, 3)]
    desk.over()


async def test_a_pull_that_ended_before_its_cancel_was_passed_on_is_reported_as_it_ended(
    desk: Desk,
) -> None:
    key = await desk.pulling()
    desk.end()
    async with asyncio.timeout(TIMEOUT_S):
        await desk.woken.wait()  # it ended, and the engine does not know
    assert desk.engine.cancel(key) is None
    desk.settle()
    assert desk.outcomes == [None]
    assert desk.freed == [Freed(key.request, 3)]
    desk.submit(key.request)  # its name is free, and no old word is for the new one
    desk.settle()
    assert desk.engine.kv_imports.stops == desk.engine.kv_imports.reports
    assert desk.engine.cancel(key) is None
    desk.client.stops.set()
    await desk.until_told(4)
    assert desk.outcomes == [None, "cancelled"]
    desk.over()


@pytest.mark.parametrize("kind", [TransferFailure.LOST, TransferFailure.REVOKED])
@pytest.mark.parametrize("tokens", [True, False])
async def test_a_pull_that_fails_is_reported_by_name_and_the_prompt_computed(
    desk: Desk, kind: TransferFailure, tokens: bool
) -> None:
    key = await desk.pulling()
    first = truth()[:1] if tokens else []
    if tokens:
        desk.consumer.go_on(key, pack(first), 0.0)
    error = TransferError(kind, "it is gone", TransferBackend.TCP)
    desk.client.ends[b"2"].set_exception(error)
    await desk.until_told(1)
    assert desk.outcomes == [kind]
    if not tokens:
        assert desk.engine.idle  # nobody knows yet whether there are tokens
        desk.consumer.go_on(key, b"", 0.0)
    assert first + run(desk.engine).ids == truth()
    desk.over()


async def test_nothing_comes_while_it_is_pulled(desk: Desk) -> None:
    key = await desk.pulling()
    desk.consumer.go_on(key, b"", 0.0)
    assert desk.engine.idle  # the mover may still write
    desk.settle()
    desk.client.stops.set()
    await desk.until_told(1)
    assert desk.outcomes == ["cancelled"]
    assert run(desk.engine).ids == truth()
    desk.over()


@pytest.mark.parametrize(("ticket", "outcome"), [(False, "timeout"), (True, "no_room")])
async def test_a_pull_that_never_began_is_reported_late_once(
    desk: Desk, ticket: bool, outcome: str
) -> None:
    key = desk.submit(ticket=ticket)
    desk.consumer.go_on(key, pack(truth()[:1]), 0.0)
    desk.engine.expire(1.0)
    desk.settle()
    desk.settle()
    assert desk.told == [
        Transferred(key.request, "p", None, 0, 0, 1000.0, TransferFailure(outcome))
    ]
    assert truth()[:1] + run(desk.engine).ids == truth()
    desk.over()
    assert desk.client.started == []


async def test_a_late_pull_whose_turn_never_came_does_not_blame_its_source(desk: Desk) -> None:
    for number in range(10, 10 + MAX_PULLS_OF_SOURCE):
        await desk.pulling(number)
    key = desk.submit()
    desk.settle()
    desk.consumer.go_on(key, pack(truth()[:1]), 0.0)
    desk.engine.expire(1.0)
    desk.settle()
    await desk.until_told(1)
    assert desk.outcomes == ["no_room"]
    assert b"2" not in desk.client.started
    assert not desk.engine.idle
    desk.engine.cancel_link(0)
    desk.settle()
    desk.client.stops.set()
    await desk.until_told(1 + 2 * MAX_PULLS_OF_SOURCE)
    assert len(desk.freed) == MAX_PULLS_OF_SOURCE
    desk.over()


async def test_too_many_first_tokens_fail_the_request_that_waits_for_some_and_no_other(
    desk: Desk,
) -> None:
    key = await desk.pulling()
    many = bytes(4 * (desk.engine.context_tokens + 1))
    desk.consumer.go_on(Key(0, 77), many, 0.0)  # there is none
    with pytest.raises(RequestError) as caught:
        desk.consumer.go_on(key, many, 0.0)
    assert caught.value.kind is FailureKind.BAD_RESUME
    desk.consumer.go_on(key, pack(truth()[:1]), 0.0)
    desk.consumer.go_on(key, many, 0.0)  # again: not looked at
    desk.engine.cancel(key)
    desk.consumer.go_on(key, many, 0.0)
    desk.settle()
    desk.client.stops.set()
    await desk.until_told(2)
    desk.over()

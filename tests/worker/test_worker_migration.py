"""A worker that leaves hands its hot blocks to one that stays; the test is their router."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.wire.frames import Cancel, Drain, Fetch, KvFrom, MigrationOrder, Offer, Transferred
from helpers.engine.toy import make_submit
from helpers.kv.pull_keys import OTHER_PULL_KEY, PULL_KEY
from helpers.worker.scene import true_greedy
from helpers.worker.split import Pair, pair

LONG = list(range(40))


@pytest.fixture
async def pair_of_workers(tmp_path: Path) -> AsyncGenerator[Pair]:
    """The prefill worker leaves, and the decode worker stays: for this their roles do not matter."""
    async with pair(tmp_path) as workers:
        yield workers


def fetch(two: Pair, offer: Offer, number: int, **changes: Any) -> Fetch:
    """All that is offered."""
    assert two.p.hello is not None
    whole = Fetch(
        request=number,
        kv_from=KvFrom("p", two.p.hello.transfer, 20_000, PULL_KEY),
        ticket=offer.ticket,
        names=offer.names,
        parents=offer.parents,
        offset=list(range(len(offer.parents))),
    )
    return replace(whole, **changes)


async def offered(two: Pair, blocks: int = 100, budget_ms: int = 20_000) -> Offer:
    two.p.send(Drain(budget_ms, MigrationOrder(blocks, PULL_KEY)))
    return await two.p.until_frame(Offer)


async def fetched(two: Pair, number: int) -> Transferred:
    await two.d.until(lambda: bool(two.d.answer(number).transferred))
    (report,) = two.d.answer(number).transferred
    return report


async def test_what_was_hot_stays_in_the_fleet(pair_of_workers: Pair) -> None:
    two = pair_of_workers
    for number in (1, 2, 3):
        two.p.send(make_submit(number, LONG, max_tokens=1))
    two.p.send(make_submit(4, LONG[:8] + [7] * 9, max_tokens=1))
    await two.p.until_freed(1, 2, 3, 4)
    offer = await offered(two)
    names = [offer.names[at : at + 16] for at in range(0, len(offer.names), 16)]
    assert len(names) == len(set(names)) == 10 + 2
    assert offer.hits[0] == max(offer.hits)  # all four began with it
    two.d.send(fetch(two, offer, 50))
    report = await fetched(two, 50)
    assert (report.worker, report.error, report.blocks) == ("p", None, 12)
    assert two.d.cache == two.p.cache
    two.p.send(Drain(20_000))  # everybody has what they want
    await two.prefill.ended()
    two.d.send(make_submit(5, LONG, max_tokens=4))
    await two.d.until_freed(5)
    assert two.d.answer(5).ids == true_greedy(LONG, 4)
    assert two.d.answer(5).cached_tokens == 36  # all but the last block
    two.decode.check()


async def test_only_what_is_missing_and_asked_for_is_fetched(pair_of_workers: Pair) -> None:
    two = pair_of_workers
    two.p.send(make_submit(1, LONG, max_tokens=1))
    two.d.send(make_submit(2, LONG[:9], max_tokens=1))
    await two.p.until_freed(1)
    await two.d.until_freed(2)
    offer = await offered(two, blocks=6)
    assert len(offer.parents) == 6
    some = slice(0, 4 * 16)
    two.d.send(
        fetch(
            two, offer, 50, names=offer.names[some], parents=offer.parents[:4], offset=[0, 1, 2, 3]
        )
    )
    report = await fetched(two, 50)
    assert (report.error, report.blocks) == (None, 2)
    two.d.send(fetch(two, offer, 51))  # the same offer once more
    report = await fetched(two, 51)
    assert (report.error, report.blocks) == (None, 2)
    two.p.send(Drain(20_000))
    await two.prefill.ended()
    two.d.send(make_submit(3, LONG, max_tokens=4))
    await two.d.until_freed(3)
    assert (two.d.answer(3).ids, two.d.answer(3).cached_tokens) == (true_greedy(LONG, 4), 24)
    two.decode.check()


async def test_an_offer_ends_with_its_lease(pair_of_workers: Pair) -> None:
    two = pair_of_workers
    two.p.send(make_submit(1, LONG, max_tokens=1))
    await two.p.until_freed(1)
    offer = await offered(two, budget_ms=30)
    await two.prefill.ended()  # by itself
    two.d.send(fetch(two, offer, 50))
    report = await fetched(two, 50)
    assert report.error == "lost"
    two.decode.check()
    assert two.d.cache == set()


async def test_a_worker_with_nothing_to_offer_says_so(pair_of_workers: Pair) -> None:
    offer = await offered(pair_of_workers)
    assert (offer.names, offer.parents, offer.hits) == (b"", [], [])
    pair_of_workers.d.send(fetch(pair_of_workers, offer, 50))
    assert (await fetched(pair_of_workers, 50)).blocks == 0
    pair_of_workers.p.send(Drain(20_000))
    await pair_of_workers.prefill.ended()


async def test_a_fetch_that_is_cancelled_or_has_a_bad_ticket_leaves_nothing(
    pair_of_workers: Pair,
) -> None:
    two = pair_of_workers
    two.p.send(make_submit(1, LONG, max_tokens=1))
    await two.p.until_freed(1)
    offer = await offered(two)
    two.d.send(fetch(two, offer, 50, ticket=bytes(24)))
    assert (await fetched(two, 50)).error == "refused"
    two.d.send(fetch(two, offer, 51, offset=[99] * 10))
    assert (await fetched(two, 51)).error == "refused"
    two.d.send(fetch(two, offer, 52), Cancel(52))
    assert (await fetched(two, 52)).error in {"cancelled", None}
    await two.d.until_freed(52)
    two.d.send(fetch(two, offer, 53), fetch(two, offer, 53))  # the second is none
    assert (await fetched(two, 53)).error is None
    two.p.send(Drain(0))
    await two.prefill.ended()
    two.decode.check()


async def test_an_offer_is_for_those_who_have_its_key(pair_of_workers: Pair) -> None:
    two = pair_of_workers
    assert two.p.hello is not None
    two.p.send(make_submit(1, LONG, max_tokens=1))
    await two.p.until_freed(1)
    offer = await offered(two)
    stranger = KvFrom("p", two.p.hello.transfer, 20_000, OTHER_PULL_KEY)
    for number in (50, 51):  # the second time others have a connection
        two.d.send(fetch(two, offer, number, kv_from=stranger))
        assert (await fetched(two, number)).error == "refused"
        assert two.d.cache == set()
        two.d.send(fetch(two, offer, number + 10, offset=[99] * 10))
        assert (await fetched(two, number + 10)).error == "refused"
    two.d.send(fetch(two, offer, 70))
    report = await fetched(two, 70)
    assert (report.error, report.blocks) == (None, 10)
    two.p.send(Drain(20_000))
    await two.prefill.ended()
    two.decode.check()


async def test_a_fetch_takes_only_room_that_nobody_needs(tmp_path: Path) -> None:
    async with pair(tmp_path, decode_blocks=12) as two:
        two.p.send(make_submit(1, LONG, max_tokens=1))
        await two.p.until_freed(1)
        gate = two.decode.model.gate = threading.Semaphore(0)
        two.d.send(make_submit(2, [7] * 20, max_tokens=20))
        gate.release(2)
        await two.d.until(lambda: bool(two.d.answer(2).ids))
        offer = await offered(two)
        two.d.send(fetch(two, offer, 50))
        gate.release(1000)
        report = await fetched(two, 50)
        assert report.error is None
        assert report.blocks < 7
        await two.d.until_freed(2)
        assert two.d.answer(2).ids == true_greedy([7] * 20, 20)
        two.decode.check()


async def test_a_fetch_waits_for_the_step_in_flight_and_nobody_for_the_fetch(
    pair_of_workers: Pair,
) -> None:
    two = pair_of_workers
    two.p.send(make_submit(1, LONG, max_tokens=1))
    await two.p.until_freed(1)
    offer = await offered(two)
    gate = two.decode.model.gate = threading.Semaphore(0)
    two.d.send(make_submit(2, [7] * 9, max_tokens=50))
    await two.decode.computing()
    two.d.send(fetch(two, offer, 50), fetch(two, offer, 51), Cancel(51), Cancel(2))
    await two.d.until_freed(2, 51)  # the step has not ended
    assert (await fetched(two, 51)).error == "cancelled"
    assert two.d.answer(50).transferred == []
    gate.release(1000)
    report = await fetched(two, 50)
    assert (report.error, report.blocks) == (None, 10)
    two.d.send(make_submit(3, LONG, max_tokens=4))
    await two.d.until_freed(3)
    assert (two.d.answer(3).ids, two.d.answer(3).cached_tokens) == (true_greedy(LONG, 4), 36)
    two.decode.check()

"""Split serving in which something is lost, late, doubled or false; the test is the router of two real workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kv_transfer.peers.members import Transcript
from headrace.wire.frames import (
    Bye,
    Cancel,
    Continue,
    Drain,
    FailureKind,
    KvFrom,
    Ticket,
    Transferred,
)
from helpers.engine.toy import make_submit, pack
from helpers.kv.pull_keys import OTHER_PULL_KEY, PULL_KEY
from helpers.worker.fake_router import TIMEOUT_S, FakeRouter
from helpers.worker.scene import joined, running, true_greedy
from helpers.worker.split import PREFILL, Legs, Pair, pair

LONG = list(range(40))  # three steps of the workers


@pytest.fixture
async def two(tmp_path: Path) -> AsyncGenerator[Pair]:
    async with pair(tmp_path) as workers:
        yield workers


async def test_a_prefill_worker_that_dies_during_the_pull_costs_nothing_but_time(
    two: Pair,
) -> None:
    await two.whole(9, [1, 2, 3], max_tokens=2)  # so that there is a connection
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=5)
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    await two.prefill.stop()
    await two.d.until(lambda: bool(two.pull_outcomes(1)))
    assert two.pull_outcomes(1) == ["lost"]
    two.d.send(Continue(1, b""))
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 5)
    two.decode.check()


async def test_a_prefill_worker_that_dies_after_the_first_token(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5)
    await two.ready(1)
    await two.p.until(lambda: bool(two.first(1).ids))
    ready = await two.ready(1)
    await two.prefill.stop()
    two.d.send(Ticket(1, ready.ticket), Continue(1, pack(two.first(1).ids)))
    await two.d.until_freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == ["lost"]
    two.decode.check()


async def test_without_a_ticket_in_time_the_prompt_is_computed_here(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5, timeout_ms=30, lease_ms=1000)
    assert await two.go_on(1)  # and the ticket is lost
    await two.d.until_freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == ["timeout"]
    two.p.send(Cancel(PREFILL + 1))
    await two.p.until_freed(PREFILL + 1)
    two.check()


async def decodes_without_its_pull(two: Pair) -> None:
    """The pull of request 1 is refused, and its decode worker computes the prompt."""
    assert await two.go_on(1)
    await two.d.until_freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == ["refused"]
    two.p.send(Cancel(PREFILL + 1))
    await two.p.until_freed(PREFILL + 1)
    two.check()


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(24), bytes(256)], ids=len)
async def test_a_ticket_that_is_none_makes_the_worker_do_it_itself(
    two: Pair, ticket: bytes
) -> None:
    two.submit(1, LONG, max_tokens=5)
    two.d.send(Ticket(1, ticket))
    await decodes_without_its_pull(two)


async def test_without_the_key_of_the_ticket_the_prompt_is_computed_here(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5, pull_key=OTHER_PULL_KEY)
    await two.pass_on(1)
    await decodes_without_its_pull(two)


async def test_a_ticket_that_was_stolen_is_still_that_of_its_request(two: Pair) -> None:
    """One request's ticket comes to another one's decode leg, over the connection that both use."""
    await two.whole(9, [1, 2, 3], max_tokens=2)
    two.submit(1, LONG, max_tokens=5)
    ready = await two.ready(1)
    stolen = make_submit(2, LONG, max_tokens=5, salt=b"thief")
    assert two.p.hello is not None
    kv_from = KvFrom("p", two.p.hello.transfer, 20_000, OTHER_PULL_KEY)
    two.d.send(replace(stolen, kv_from=kv_from), Ticket(2, ready.ticket))
    await two.d.until(lambda: bool(two.pull_outcomes(2)))
    two.d.send(Continue(2, b""))
    await two.d.until_freed(2)
    assert two.pull_outcomes(2) == ["refused"]
    assert two.d.answer(2).ids == true_greedy(LONG, 5)
    await two.pass_on(1)
    assert await two.go_on(1)
    await two.freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == [None]
    two.check()


async def test_a_second_ticket_and_a_second_continue_change_nothing(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5)
    ready = await two.ready(1)
    two.d.send(Ticket(1, ready.ticket), Ticket(1, bytes(24)))
    assert await two.go_on(1)
    two.d.send(Continue(1, pack([7])), Continue(1, b""), Ticket(1, b"late"))
    await two.freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == [None]
    two.check()


async def test_words_about_unknown_requests_are_ignored(two: Pair) -> None:
    two.d.send(Ticket(9, b"x"), Continue(9, b""), Continue(9, pack([1])), Cancel(9))
    await two.d.until_freed(9)
    two.d.send(make_submit(1, LONG, max_tokens=3))
    two.d.send(Ticket(1, b"x"), Continue(1, b""))  # it waits for neither
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 3)
    two.check()


async def test_alone_before_the_ticket(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5)
    two.d.send(Continue(1, b""))
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 5)
    two.p.send(Cancel(PREFILL + 1))
    await two.freed(1)
    two.check()


async def test_alone_during_the_pull(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=5)
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    two.d.send(Continue(1, b""))
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == ["cancelled"]
    two.p.send(Cancel(PREFILL + 1))
    gate.release(100)
    await two.freed(1)
    two.check()


async def test_a_lease_that_ends_frees_the_blocks(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5, lease_ms=30)
    ready = await two.ready(1)
    await two.p.until_freed(PREFILL + 1)  # an idle worker wakes for that
    assert two.first(1).ids == true_greedy(LONG, 1)
    assert two.first(1).freed == 10
    two.d.send(Ticket(1, ready.ticket), Continue(1, pack(two.first(1).ids)))
    await two.d.until_freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1)[0] in {"revoked", "expired", "refused"}
    two.check()


async def test_a_pull_that_is_too_slow_is_given_up(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=5, timeout_ms=30)
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    two.d.send(Continue(1, pack(true_greedy(LONG, 1))))
    await two.d.until_freed(1)
    assert two.d.answer(1).ids == true_greedy(LONG, 5)[1:]
    assert two.pull_outcomes(1) == ["timeout"]
    two.p.send(Cancel(PREFILL + 1))
    gate.release(100)
    await two.freed(1)
    two.check()


async def test_a_decode_worker_without_room_waits_and_then_pulls(tmp_path: Path) -> None:
    async with pair(tmp_path, decode_blocks=16) as two:
        two.d.send(make_submit(1, [1] * 40, max_tokens=20))
        await two.d.until(lambda: bool(two.d.answer(1).ids))
        two.submit(2, LONG, max_tokens=5)
        await two.pass_on(2)
        assert await two.go_on(2)
        await two.freed(2)
        assert two.joined(2).ids == true_greedy(LONG, 5)
        assert two.pull_outcomes(2) == [None]
        two.check()


async def test_a_decode_worker_without_room_in_time_does_not_blame_the_source(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, decode_blocks=16) as two:
        gate = two.decode.model.gate = threading.Semaphore(0)
        two.d.send(make_submit(1, [1] * 40, max_tokens=20))
        gate.release(4)  # its prompt: it has its blocks, and goes no further
        await two.d.until(lambda: bool(two.d.answer(1).ids))
        two.submit(2, LONG, max_tokens=5, timeout_ms=0)
        await two.pass_on(2)
        assert await two.go_on(2)
        gate.release(1000)
        await two.d.until_freed(2)
        assert two.joined(2).ids == true_greedy(LONG, 5)
        assert two.pull_outcomes(2) == ["no_room"]
        two.p.send(Cancel(PREFILL + 2))
        await two.freed(2)
        await two.d.until_freed(1)
        two.check()


async def test_the_router_of_both_is_lost(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG)
    two.submit(2, LONG[:20])
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    two.router.hang_up_all()
    gate.release(100)
    links = [await joined(two.router), await joined(two.router)]
    two.p, two.d = sorted(links, key=lambda talk: talk.hello.role != "prefill" if talk.hello else 0)
    # all that belonged to the old links is gone once both have taken in that they are lost
    for number, talk in ((3, two.p), (4, two.d)):
        talk.send(Cancel(number))
        await talk.until_freed(number)
    answer = await two.whole(5, LONG, max_tokens=5)
    assert answer.ids == true_greedy(LONG, 5)
    two.check()


# --- workers that leave, or move nothing ---


async def test_a_prefill_worker_that_drains_serves_its_exports_first(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=5)
    ready = await two.ready(1)
    two.p.send(Drain(20_000))
    await two.p.until_frame(Bye)
    two.p.send(make_submit(2, [1], max_tokens=1))
    await two.p.until(lambda: two.p.answer(2).failed is not None)
    failed = two.p.answer(2).failed
    assert failed is not None
    assert failed.kind is FailureKind.DRAINING
    await two.p.until(lambda: bool(two.first(1).ids))
    assert not two.prefill.task.done()
    two.d.send(Ticket(1, ready.ticket))
    assert await two.go_on(1)
    await two.freed(1)
    assert two.joined(1).ids == true_greedy(LONG, 5)
    assert two.pull_outcomes(1) == [None]
    await two.prefill.ended()
    two.decode.check()


async def test_at_the_end_of_its_budget_a_draining_worker_gives_everything_up(two: Pair) -> None:
    gate = two.prefill.model.gate = threading.Semaphore(0)
    two.submit(1, LONG, max_tokens=100)
    gate.release(1)
    await two.pass_on(1)
    await two.reserved(10)
    two.d.send(Drain(0))
    await two.decode.ended()
    await two.d.until_freed(1)
    failed = two.d.answer(1).failed
    assert failed is not None
    assert failed.kind is FailureKind.DRAINING
    two.decode.check()
    two.p.send(Drain(0))
    gate.release(100)
    await two.prefill.ended()
    await two.p.until_freed(PREFILL + 1)
    two.prefill.check()


async def test_a_worker_that_moves_no_kv_says_so(tmp_path: Path) -> None:
    async with FakeRouter(tmp_path / "r") as router, running(router) as scene:
        talk = await joined(router)
        legs = (
            make_submit(1, [1], lease_ms=1),
            make_submit(2, [1], kv_from=KvFrom("p", [], 1, PULL_KEY)),
        )
        talk.send(*legs, Ticket(3, b""), Continue(3, b""))
        await talk.until(lambda: all(talk.answer(n).failed is not None for n in (1, 2)))
        for number in (1, 2):
            failed = talk.answer(number).failed
            assert failed is not None
            assert failed.kind is FailureKind.UNSUPPORTED
        scene.check()


async def test_reports_name_the_request_and_its_source(two: Pair) -> None:
    two.submit(1, LONG, max_tokens=2)
    await two.pass_on(1)
    report = await two.d.until_frame(Transferred)
    assert (report.request, report.worker, report.error) == (1, "p", None)
    assert report.ms > 0
    assert await two.go_on(1)
    await two.freed(1)
    two.check()


async def test_a_ticket_is_of_no_use_to_a_worker_of_another_router(tmp_path: Path) -> None:
    """It has an open ticket and knows where to go, and even so it gets nothing."""
    async with (
        FakeRouter(tmp_path / "ours") as ours,
        FakeRouter(tmp_path / "other") as other,
        running(ours, name="p", role="prefill", transfer=True) as prefill,
        running(other, name="d", role="decode", transfer=True) as decode,
    ):
        legs = Legs(await joined(ours, hash_key=b"a" * 32), await joined(other, hash_key=b"b" * 32))
        legs.submit(1, LONG, max_tokens=5)
        await legs.pass_on(1)
        await legs.d.until(lambda: bool(legs.pull_outcomes(1)))
        assert legs.pull_outcomes(1) == ["lost"]
        assert prefill.transfer is not None
        assert prefill.transfer.server.turned_away["proof"] > 0
        assert prefill.transfer.server.open_tickets == 1
        legs.d.send(Continue(1, b""))
        await legs.d.until_freed(1)
        assert legs.d.answer(1).ids == true_greedy(LONG, 5)
        decode.check()


async def test_after_its_router_has_gone_a_worker_gives_nobody_anything(two: Pair) -> None:
    assert two.prefill.transfer is not None
    about = Transcript(bytes(16), bytes(16), bytes(24))
    assert two.prefill.transfer.members.puller_proofs(about)
    two.p.hang_up()
    async with asyncio.timeout(TIMEOUT_S):
        while two.prefill.transfer.members.puller_proofs(about):  # noqa: ASYNC110
            await asyncio.sleep(0)

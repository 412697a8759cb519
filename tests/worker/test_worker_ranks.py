"""Workers of one group: who has work is helped by who has none, and all of them sleep, leave and end together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.engine.errors import FailureKind
from headrace.wire.frames import Bye, Cancel, Drain, GroupTotals
from headrace_kernels.moe.transport import RankLost
from helpers.engine.toy import make_submit
from helpers.ranks.worker_ranks import worker_ranks
from helpers.worker.scene import true_greedy
from helpers.worker.split import PREFILL, Legs


@pytest.mark.parametrize("overlap", [True, False])
async def test_ranks_without_requests_compute_for_the_one_that_has_some(
    overlap: bool, tmp_path: Path
) -> None:
    async with worker_ranks(tmp_path, 3, overlap=overlap) as ranks:
        talk = ranks.talks[1]
        talk.send(make_submit(1, [1, 2, 3], max_tokens=30))
        await talk.until_freed(1)
        assert talk.answer(1).ids == true_greedy([1, 2, 3], 30)
        assert ranks.passes[0] == ranks.passes[1] == ranks.passes[2] >= 30
        # Those who only helped have nothing to tell.
        assert {step.step for other in (0, 2) for step in ranks.talks[other].steps} <= {0}


async def test_all_ranks_serve_at_once(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 3) as ranks:
        for rank, talk in enumerate(ranks.talks):
            for request in range(1 + 3 * rank):
                talk.send(make_submit(request, [rank, request, 3], max_tokens=10 + 5 * rank))
        for rank, talk in enumerate(ranks.talks):
            for request in range(1 + 3 * rank):
                await talk.until_freed(request)
                want = true_greedy([rank, request, 3], 10 + 5 * rank)
                assert talk.answer(request).ids == want


async def test_a_request_of_a_rank_that_helps_is_computed_in_the_next_round(tmp_path: Path) -> None:
    """Not once the others have no more work."""
    async with worker_ranks(tmp_path, 2) as ranks:
        first, second = ranks.talks
        first.send(make_submit(1, [1, 2, 3], max_tokens=240))
        await first.until(lambda: bool(first.answer(1).ids))
        second.send(make_submit(2, [4, 5], max_tokens=4))
        await second.until_freed(2)
        assert second.answer(2).ids == true_greedy([4, 5], 4)
        assert not ranks.scenes[0].engine.empty
        await first.until_freed(1)
        assert first.answer(1).ids == true_greedy([1, 2, 3], 240)


async def test_a_group_that_sleeps_computes_nothing_and_wakes(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        for request, rank in enumerate((1, 0, 1)):
            talk = ranks.talks[rank]
            talk.send(make_submit(request, [1, 2, 3], max_tokens=5))
            await talk.until_freed(request)
            await asyncio.to_thread(ranks.group.until_asleep)
            assert ranks.passes == [5 * (request + 1)] * 2


async def test_a_cancel_ends_a_request_of_a_group(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        first, second = ranks.talks
        first.send(make_submit(1, [1] * 30, max_tokens=200))
        second.send(make_submit(2, [2] * 5, max_tokens=40))
        await first.until(lambda: len(first.answer(1).ids) > 3)
        first.send(Cancel(1))
        await first.until_freed(1)
        await second.until_freed(2)
        assert second.answer(2).ids == true_greedy([2] * 5, 40)


async def test_what_drains_one_rank_drains_all_and_nothing_is_cut_short(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 3) as ranks:
        busy, drained = ranks.talks[0], ranks.talks[2]
        busy.send(make_submit(1, [1, 2, 3], max_tokens=60))
        await busy.until(lambda: len(busy.answer(1).ids) > 3)
        drained.send(Drain(budget_ms=60_000))
        await busy.until_freed(1)
        assert busy.answer(1).ids == true_greedy([1, 2, 3], 60)
        for scene, talk in zip(ranks.scenes, ranks.talks, strict=True):
            await scene.ended()
            await talk.until_closed()
            assert any(isinstance(frame, Bye) for frame in talk.seen)
            scene.check()
        assert len({member.number for member in ranks.group.members}) == 1


async def test_a_rank_that_is_told_to_leave_while_all_sleep_takes_the_others_along(
    tmp_path: Path,
) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        ranks.talks[1].send(Drain(budget_ms=60_000))
        for scene in ranks.scenes:
            await scene.ended()
        assert ranks.passes == [0, 0]


async def test_a_rank_out_of_time_fails_what_runs_on_all(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        for request, talk in enumerate(ranks.talks):
            talk.send(make_submit(request, [1, 2, 3], max_tokens=240))
            await talk.until(lambda talk=talk, request=request: len(talk.answer(request).ids) > 2)
        ranks.talks[1].send(Drain(budget_ms=0))
        for request, (scene, talk) in enumerate(zip(ranks.scenes, ranks.talks, strict=True)):
            await talk.until(
                lambda talk=talk, request=request: talk.answer(request).failed is not None
            )
            failed = talk.answer(request).failed
            assert failed is not None
            assert failed.kind is FailureKind.DRAINING
            await scene.ended()


async def test_a_step_that_another_rank_ends_fails_by_name_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        talk = ranks.talks[0]
        ranks.scenes[1].model.fail_next = OSError("no memory")
        talk.send(make_submit(1, [1, 2, 3], max_tokens=9))
        await talk.until(lambda: talk.answer(1).failed is not None)
        failed = talk.answer(1).failed
        assert failed is not None
        assert "rank 1 failed: OSError: no memory" in failed.message
        talk.send(make_submit(2, [1, 2, 3], max_tokens=9))
        await talk.until_freed(2)
        assert talk.answer(2).ids == true_greedy([1, 2, 3], 9)


@pytest.mark.parametrize("works", [True, False])
async def test_a_lost_rank_ends_the_workers_of_the_group_by_name(
    works: bool, tmp_path: Path
) -> None:
    async with worker_ranks(tmp_path, 3) as ranks:
        talk = ranks.talks[0]
        talk.send(make_submit(1, [1, 2, 3], max_tokens=200))
        await talk.until(lambda: len(talk.answer(1).ids) > 3)
        survivor = 0 if works else 1
        ranks.group.members[2].leave()
        await talk.until(lambda: talk.answer(1).failed is not None)
        failed = talk.answer(1).failed
        assert failed is not None
        assert failed.kind is FailureKind.ENGINE
        assert "rank 2 is lost: its process ended" in failed.message
        with pytest.raises(BaseExceptionGroup) as ended:
            await ranks.scenes[survivor].ended()
        assert ended.group_contains(RankLost, match="rank 2")


async def test_a_rank_that_is_lost_while_all_sleep_ends_the_group(tmp_path: Path) -> None:
    async with worker_ranks(tmp_path, 2) as ranks:
        ranks.group.members[1].leave()
        with pytest.raises(BaseExceptionGroup) as ended:
            await ranks.scenes[0].ended()
        assert ended.group_contains(RankLost, match="rank 1")


@pytest.mark.parametrize("busy", [False, True])
async def test_kv_moves_between_ranks_of_a_group(busy: bool, tmp_path: Path) -> None:
    """The rank that pulls has no rows meanwhile, and joins the rounds of the others."""
    async with worker_ranks(tmp_path, 3, transfer=True) as ranks:
        third = ranks.talks[2]
        if busy:
            third.send(make_submit(1, [9, 8, 7], max_tokens=150))
            await third.until(lambda: bool(third.answer(1).ids))
        legs = Legs(p=ranks.talks[0], d=ranks.talks[1])
        for number in range(3):
            prompt = [number + 2] * (3 + 9 * number)
            answer = await legs.whole(number, prompt, max_tokens=12)
            assert answer.ids == true_greedy(prompt, 12)
            assert legs.pull_outcomes(number) == [None]
        if busy:
            await third.until_freed(1)
            assert third.answer(1).ids == true_greedy([9, 8, 7], 150)


@pytest.mark.parametrize("stage", ["before the ticket", "before its first token", "decoding"])
async def test_a_split_request_of_a_group_is_cancelled_at_any_stage(
    stage: str, tmp_path: Path
) -> None:
    async with worker_ranks(tmp_path, 3, transfer=True) as ranks:
        third = ranks.talks[2]
        third.send(make_submit(9, [9, 8, 7], max_tokens=150))
        legs = Legs(p=ranks.talks[0], d=ranks.talks[1])
        legs.submit(1, [5] * 30, max_tokens=100)
        if stage != "before the ticket":
            await legs.pass_on(1)
        if stage == "decoding":
            assert await legs.go_on(1)
            await legs.d.until(lambda: len(legs.d.answer(1).ids) > 2)
        legs.p.send(Cancel(PREFILL + 1))
        legs.d.send(Cancel(1))
        await legs.freed(1)
        await third.until_freed(9)
        assert third.answer(9).ids == true_greedy([9, 8, 7], 150)
        await asyncio.to_thread(ranks.group.until_asleep)
        for scene in ranks.scenes:
            scene.check()


async def test_a_deadline_passes_on_a_rank_whose_request_waits(tmp_path: Path) -> None:
    """It has no row: the round that it joins does not keep it from being told."""
    async with worker_ranks(tmp_path, 2) as ranks:
        first, second = ranks.talks
        first.send(make_submit(1, [1, 2, 3], max_tokens=200))
        await first.until(lambda: bool(first.answer(1).ids))
        second.send(make_submit(2, [1] * 9, max_tokens=240, deadline_ms=1))
        await second.until(lambda: second.answer(2).finish is not None)
        assert second.answer(2).finish == "cancelled"
        await first.until_freed(1)
        assert first.answer(1).ids == true_greedy([1, 2, 3], 200)


@pytest.mark.parametrize("overlap", [True, False])
async def test_prompts_that_wait_for_those_of_other_ranks_begin_after_some_rounds(
    overlap: bool, tmp_path: Path
) -> None:
    async with worker_ranks(tmp_path, 2, overlap=overlap, prompt_wait_rounds=8) as ranks:
        first, second = ranks.talks
        first.send(make_submit(1, [1, 2, 3], max_tokens=200))
        await first.until(lambda: bool(first.answer(1).ids))
        for request in range(2, 5):
            second.send(make_submit(request, [request] * 9, max_tokens=5))
            await second.until_freed(request)
            assert second.answer(request).ids == true_greedy([request] * 9, 5)
        await first.until_freed(1)
        assert first.answer(1).ids == true_greedy([1, 2, 3], 200)
        rounds = ranks.scenes[1].engine.rounds
        assert rounds is not None
        assert 0 < rounds.held_rounds <= 3 * (8 + 1)  # a step may be planned before the agreement
        assert rounds.held_ms > 0
        due = GroupTotals(rounds.held_rounds, rounds.held_ms)
        await second.until(lambda: due in second.seen)  # with a heartbeat at the latest

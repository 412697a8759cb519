"""The scheduler: budgets, fairness, preemption, admission. Sequences here are only lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import RequestError
from headrace.engine.sequence import Sequence
from helpers.engine.scheduling import counts, make_scheduler, make_sequence, run_step


def test_prompts_share_the_budget_first_come_first_served() -> None:
    scheduler = make_scheduler(batched=16)
    for length in (5, 6, 9):
        scheduler.stages.wait(make_sequence(length))
    assert counts(run_step(scheduler)) == [5, 6, 5]
    assert counts(run_step(scheduler)) == [1, 1, 4]


def test_a_long_prompt_takes_half_of_the_budget_while_others_wait() -> None:
    scheduler = make_scheduler(batched=16)
    long, short = make_sequence(40), make_sequence(5)
    scheduler.stages.wait(long)
    scheduler.stages.wait(short)
    assert counts(run_step(scheduler)) == [8 + 3, 5]  # and what the short one left
    assert counts(run_step(scheduler)) == [1, 15]
    assert short.generated


def test_decoding_never_waits_for_prompts() -> None:
    scheduler = make_scheduler(batched=8, sequences=4)
    first = make_sequence(3, answer=100)
    scheduler.stages.wait(first)
    run_step(scheduler)
    for _ in range(3):
        scheduler.stages.wait(make_sequence(60))
    for _ in range(20):
        before = len(first.generated)
        run_step(scheduler)
        assert len(first.generated) == before + 1


def test_the_block_of_the_last_prompt_token_is_computed() -> None:
    scheduler = make_scheduler()
    ids = list(range(8))
    for _ in range(2):
        scheduler.stages.wait(make_sequence(ids, answer=1))
        run_step(scheduler)
    again = make_sequence(ids, answer=1)
    scheduler.stages.wait(again)
    assert counts(run_step(scheduler)) == [4]
    assert again.cached_tokens == 4


def test_the_same_prompt_twice_is_computed_once() -> None:
    scheduler = make_scheduler(batched=64)
    ids = list(range(21))
    one, two = make_sequence(ids), make_sequence(ids)
    scheduler.stages.wait(one)
    scheduler.stages.wait(two)
    assert counts(run_step(scheduler)) == [21]  # the second waits for the blocks of the first
    assert counts(run_step(scheduler)) == [1, 1]
    assert two.cached_tokens == 20
    assert one.blocks[:5] == two.blocks[:5]


def test_one_that_waits_for_a_prefix_does_not_hold_up_others() -> None:
    scheduler = make_scheduler(batched=64)
    ids = list(range(21))
    for sequence in (make_sequence(ids), make_sequence(ids), make_sequence(6)):
        scheduler.stages.wait(sequence)
    assert counts(run_step(scheduler)) == [21, 6]


def test_the_prefix_is_computed_by_the_next_one_if_the_first_is_cancelled() -> None:
    scheduler = make_scheduler(batched=8)
    ids = list(range(21))
    one, two = make_sequence(ids), make_sequence(ids)
    scheduler.stages.wait(one)
    scheduler.stages.wait(two)
    run_step(scheduler)
    scheduler.stages.remove(one)
    assert counts(run_step(scheduler)) == [8]
    assert two.cached_tokens == 8


def test_a_full_pool_preempts_the_newest_of_the_lowest_priority() -> None:
    scheduler = make_scheduler(blocks=8, batched=32)
    old, new = make_sequence(7, answer=8), make_sequence(7, answer=8)
    important = make_sequence(7, answer=8, priority=1)
    for sequence in (new, old, important):
        scheduler.stages.wait(sequence)
    while not scheduler.stages.preemptions:
        run_step(scheduler)
    assert scheduler.stages.waiting == [new]
    assert important in scheduler.stages.running
    tokens = new.total
    while not scheduler.stages.idle:
        run_step(scheduler)
    assert new.total == new.limit >= tokens


def test_room_is_kept_for_what_running_answers_are_expected_to_write() -> None:
    scheduler = make_scheduler(blocks=10, batched=64)
    for _ in range(200):
        scheduler.admission.note_answer(16)
    scheduler.stages.wait(make_sequence(8, answer=16))
    scheduler.stages.wait(make_sequence(20, answer=16))
    assert len(run_step(scheduler).work) == 1  # 4 of the 8 blocks left are spoken for
    while not scheduler.stages.idle:
        run_step(scheduler)
    assert scheduler.stages.preemptions == 0


def test_higher_priority_goes_first() -> None:
    scheduler = make_scheduler(sequences=1, batched=8)
    low, high = make_sequence(3), make_sequence(3, priority=5)
    scheduler.stages.wait(low)
    scheduler.stages.wait(high)
    assert run_step(scheduler).work[0].sequence is high


def test_many_answers_of_low_priority_leave_a_batch_row_to_a_normal_one_at_once() -> None:
    scheduler = make_scheduler(sequences=8, batched=32)
    many = [make_sequence(3, answer=50, priority=-1) for _ in range(20)]
    for sequence in many:
        scheduler.stages.wait(sequence)
    run_step(scheduler)
    assert len(scheduler.stages.running) == 8
    few = make_sequence(3, answer=1)
    scheduler.stages.wait(few)
    assert few in [work.sequence for work in run_step(scheduler).work]
    assert few.total == few.limit
    run_step(scheduler)
    assert len(scheduler.stages.running) == 8
    assert scheduler.stages.preemptions == 1
    while not scheduler.stages.idle:
        run_step(scheduler)
    assert all(sequence.total == sequence.limit for sequence in many)


def test_what_makes_way_keeps_half_of_the_batch_rows() -> None:
    scheduler = make_scheduler(sequences=8, batched=32)
    low = [make_sequence(3, answer=30, priority=-1) for _ in range(8)]
    for sequence in low:
        scheduler.stages.wait(sequence)
    run_step(scheduler)
    for _ in range(8):
        scheduler.stages.wait(make_sequence(3, answer=30))
    for _ in range(12):
        run_step(scheduler)
    assert [sequence.priority for sequence in scheduler.stages.running] == [0] * 4 + [-1] * 4
    assert scheduler.stages.preemptions == 4
    assert scheduler.stages.running[4:] == low[:4]  # the newest made way


def test_a_normal_one_gets_the_blocks_of_those_that_make_way() -> None:
    scheduler = make_scheduler(blocks=16, sequences=6, batched=64)
    for _ in range(4):
        # Four blocks each in the end.
        scheduler.stages.wait(make_sequence(12, answer=4, priority=-1))
    run_step(scheduler)
    normal = make_sequence(12, answer=1)
    scheduler.stages.wait(normal)
    for _ in range(3):
        run_step(scheduler)
    assert normal.total == normal.limit
    while not scheduler.stages.idle:
        run_step(scheduler)


def test_equals_do_not_make_way() -> None:
    scheduler = make_scheduler(sequences=2, batched=16)
    for priority in (-1, -1, -1):
        scheduler.stages.wait(make_sequence(3, answer=9, priority=priority))
    run_step(scheduler)
    scheduler.stages.wait(make_sequence(3, priority=-1))
    run_step(scheduler)
    assert scheduler.stages.preemptions == 0


def test_waiting_is_bounded() -> None:
    scheduler = make_scheduler(waiting=2)
    scheduler.stages.wait(make_sequence(3))
    scheduler.stages.check_queue(0)
    for here, elsewhere in ((1, 1), (2, 0)):
        while len(scheduler.stages.waiting) < here:
            scheduler.stages.wait(make_sequence(3))
        with pytest.raises(RequestError) as caught:
            scheduler.stages.check_queue(elsewhere)
        assert caught.value.kind == "queue_full"


@settings(max_examples=80, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, 3),  # family of prompts
            st.integers(1, 30),  # prompt
            st.integers(1, 20),  # answer
            st.integers(-1, 1),  # priority
            st.integers(0, 6),  # submitted after so many steps more
        ),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(13, 40),
    batched=st.integers(4, 24),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_everything_ends_and_nothing_leaks(
    jobs: list[tuple[int, int, int, int, int]], blocks: int, batched: int, cancelled: set[int]
) -> None:
    scheduler = make_scheduler(blocks=blocks, sequences=4, batched=batched)
    submitted: list[Sequence] = []
    for family, prompt, answer, priority, steps in jobs:
        ids = [family] * 9 + list(range(prompt))
        sequence = make_sequence(ids[:prompt], answer=answer, priority=priority)
        scheduler.stages.wait(sequence)
        submitted.append(sequence)
        for _ in range(steps):
            plan = run_step(scheduler)
            assert sum(counts(plan)) <= batched
    for place in cancelled:
        if place < len(submitted):
            sequence = submitted[place]
            if sequence in scheduler.stages.running or sequence in scheduler.stages.waiting:
                scheduler.stages.remove(sequence)
    steps = 0
    while not scheduler.stages.idle:
        assert run_step(scheduler).work, "nothing to do although something waits"
        steps += 1
        assert steps < 5_000
    assert scheduler.pool.used == 0
    for place, sequence in enumerate(submitted):
        assert place in cancelled or sequence.total == sequence.limit

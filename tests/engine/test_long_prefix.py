"""Long shared prefixes: what waits for one is not walked in each step, and everything is decided as if it were."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.scheduler import Plan
from headrace.engine.sequence import Sequence
from helpers.engine.scheduling import BLOCK, counts, make_scheduler, make_sequence, run_step


class WalkingPool(BlockPool):
    """Looks at every name each time that it is asked."""

    def depth(self, names: Items[bytes], most: int) -> int:
        return len(self.match(names[:most]))

    def unreferenced_of(self, names: Items[bytes], depth: int) -> int:
        return self.unreferenced(self.match(names[:depth]))


def decided(plan: Plan, here: list[Sequence]) -> list[object]:
    """All that a plan decides, in terms that two schedulers share."""
    place = {id(sequence): i for i, sequence in enumerate(here)}
    work = [(place[id(item.sequence)], item.count) for item in plan.work]
    admitted = [place[id(sequence)] for sequence in plan.admitted]
    held = [(sequence.blocks[:], sequence.cached_tokens, sequence.stage) for sequence in here]
    return [work, admitted, held]


@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, 2),  # family of prompts
            st.integers(1, 60),  # of which this many tokens are the family's
            st.integers(0, 9),  # own tokens
            st.integers(1, 20),  # answer
            st.integers(-1, 1),  # priority
            st.integers(0, 4),  # steps before the next one comes
            st.none() | st.integers(0, 15),  # who is cancelled then
        ),
        min_size=2,
        max_size=16,
    ),
    blocks=st.integers(23, 60),
    batched=st.integers(4, 40),
    batch_rows=st.integers(1, 4),
)
def test_plans_are_those_of_a_scheduler_that_walks(
    jobs: list[tuple[int, int, int, int, int, int, int | None]],
    blocks: int,
    batched: int,
    batch_rows: int,
) -> None:
    both = [
        make_scheduler(sequences=batch_rows, batched=batched, pool=pool)
        for pool in (BlockPool(blocks), WalkingPool(blocks))
    ]
    one = both[0]
    here: tuple[list[Sequence], list[Sequence]] = [], []

    def step_both() -> None:
        plans = [run_step(scheduler) for scheduler in both]
        assert decided(plans[0], here[0]) == decided(plans[1], here[1])

    for number, (family, shared, own, answer, priority, steps, cancelled) in enumerate(jobs):
        ids = [1000 * family + i for i in range(shared)] + [
            9000 + 10 * number + i for i in range(own)
        ]
        for scheduler, submitted in zip(both, here, strict=True):
            sequence = make_sequence(ids, answer=answer, priority=priority)
            scheduler.stages.wait(sequence)
            submitted.append(sequence)
        for _ in range(steps):
            step_both()
        for scheduler, submitted in zip(both, here, strict=True):
            if cancelled is not None and cancelled < len(submitted):
                scheduler.stages.remove(submitted[cancelled])
    steps = 0
    while not one.stages.idle:
        step_both()
        steps += 1
        assert steps < 5_000
    assert both[1].stages.idle
    assert one.stages.preemptions == both[1].stages.preemptions
    assert one.pool.take_events() == both[1].pool.take_events()


def test_waiting_for_a_prefix_looks_at_few_of_its_names() -> None:
    class Counting(list[bytes]):
        looked = 0

        def __getitem__(self, place: Any) -> Any:
            cut = isinstance(place, slice)
            Counting.looked += len(range(*place.indices(len(self)))) if cut else 1
            return super().__getitem__(place)

    scheduler = make_scheduler(blocks=1100, sequences=8, batched=256)
    prompt = list(range(4000))
    scheduler.stages.wait(make_sequence(prompt))
    run_step(scheduler)
    waiting = [make_sequence([*prompt, 5000 + i]) for i in range(5)]
    for sequence in waiting:
        sequence.names = Counting(sequence.names)
        scheduler.stages.wait(sequence)
    for _ in range(10):
        run_step(scheduler)
    assert scheduler.stages.waiting == waiting
    assert 0 < Counting.looked < 5 * 10 * 40
    while not scheduler.stages.idle:
        run_step(scheduler)
    assert [sequence.cached_tokens for sequence in waiting] == [4000] * 5


@pytest.mark.parametrize("missing", range(6))
@pytest.mark.parametrize("blocks", [7, 20])
def test_a_gap_in_the_cache_costs_what_follows_it_and_no_more(missing: int, blocks: int) -> None:
    """What another worker handed over may hang on contents that are not here."""
    scheduler = make_scheduler(blocks=blocks, batched=64)
    sequence = make_sequence(6 * BLOCK + 1, answer=1)
    pool = scheduler.pool
    for place, name in enumerate(sequence.names):
        if place != missing:
            found = pool.allocate(1)
            assert found is not None
            pool.publish(found[0], name, None)
            pool.release(found)
    scheduler.stages.wait(sequence)
    assert counts(run_step(scheduler)) == [sequence.prompt_len - missing * BLOCK]
    assert sequence.cached_tokens == missing * BLOCK
    assert sequence.total == sequence.limit


@pytest.mark.parametrize("held", range(6))
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_block_that_is_held_without_those_before_it_does_no_harm(held: int, spare: int) -> None:
    scheduler = make_scheduler(blocks=8, batched=64)
    sequence = make_sequence(6 * BLOCK + 1, answer=1)
    pool = scheduler.pool
    for name in sequence.names:
        found = pool.allocate(1)
        assert found is not None
        pool.publish(found[0], name, None)
        pool.release(found)
    pinned = pool.match(sequence.names)[held : held + 1]
    pool.share(pinned)
    others = pool.allocate(spare)
    assert others is not None
    scheduler.stages.wait(sequence)
    scheduler.plan()  # whatever it decides, it never takes blocks that are not there
    pool.check([*pinned, *others, *sequence.blocks])
    pool.release(pinned)
    pool.release(others)
    scheduler.stages.changed()
    run_step(scheduler)
    assert sequence.cached_tokens == 6 * BLOCK
    assert sequence.total == sequence.limit

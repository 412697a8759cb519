"""Hot blocks of one cache that another one adopts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.cache.block_pool import BlockPool, Stored
from headrace.engine.cache.hot import Uses
from headrace.engine.engine import Engine
from helpers.engine.pair import unsplit
from helpers.engine.toy import ToyHasher, ToyModel, make_submit
from helpers.engine.toy_engine import engine_on
from helpers.kv.block_copy import copy_block

BLOCK = 4


def make_engine(blocks: int = 64) -> Engine:
    return engine_on(ToyModel(), blocks=blocks, sequences=4)


def names_of(prompt: list[int]) -> list[bytes]:
    return ToyHasher(BLOCK).follow(None, np.array(prompt, np.int32), b"")


def migration(source: Engine, target: Engine, count: int, *, arrived: bool = True) -> int:
    """Copy the hottest blocks; how many were wanted."""
    hot = source.pool.hottest(count)
    blocks = source.pinned.pin([block.name for block in hot])
    place = {block.name: i for i, block in enumerate(hot)}
    parents = [-1 if block.parent is None else place[block.parent] for block in hot]
    adoption = target.pinned.adopt([block.name for block in hot], parents)
    target.check()
    for at, block in adoption.wanted:
        copy_block(source.model.kv_pool(), blocks[at], target.model.kv_pool(), block)
    target.pinned.end(adoption, arrived=arrived)
    source.pinned.release(blocks)
    for engine in (source, target):
        engine.check()
        engine.check_idle()
    return len(adoption.wanted)


def test_what_is_used_most_is_hottest_and_parents_come_first() -> None:
    engine = make_engine()
    common, rare = list(range(13)), list(range(20, 33))
    for prompt in (rare, common, common, common):
        unsplit(engine, make_submit(0, prompt, max_tokens=1))
    hot = engine.pool.hottest(4)
    assert [block.name for block in hot[:3]] == names_of(common)
    assert [block.parent for block in hot[:3]] == [None, *names_of(common)[:2]]
    assert [block.hits for block in hot] == [3, 3, 3, 1]
    assert hot[3].name == names_of(rare)[0]


def test_an_heir_finds_what_was_handed_over() -> None:
    source, target = make_engine(), make_engine()
    prompt = [7, 3] * 8
    whole = unsplit(source, make_submit(0, prompt))
    target.pool.take_events()
    # Of the prompt, and of the answer but for its last token.
    assert migration(source, target, 100) == 5
    events = target.pool.take_events()
    stored = [name for event in events if isinstance(event, Stored) for name in event.names]
    assert len(stored) == 5
    heard = unsplit(target, make_submit(0, prompt))
    assert heard.first is not None and heard.first.cached_tokens == 12
    assert heard.ids == whole.ids
    assert migration(source, target, 100) == 0  # it has them all


def test_what_did_not_arrive_is_not_found() -> None:
    source, target = make_engine(), make_engine()
    prompt = [7, 3] * 8
    unsplit(source, make_submit(0, prompt))
    assert migration(source, target, 100, arrived=False) == 5
    assert (target.pool.cached, target.pool.used) == (0, 0)
    source, target = make_engine(), make_engine()
    unsplit(source, make_submit(0, prompt))
    hot = source.pool.hottest(5)
    adoption = target.pinned.adopt([block.name for block in hot], [-1, 0, 1, 2, 3])
    target.use_hasher(ToyHasher(BLOCK, b"other"))  # the names mean nothing any more
    target.pinned.end(adoption, arrived=True)
    assert (target.pool.cached, target.pool.used) == (0, 0)


def test_pinned_blocks_stay_whatever_else_comes() -> None:
    engine = make_engine(blocks=12)
    unsplit(engine, make_submit(0, list(range(9)), max_tokens=1))
    blocks = engine.pinned.pin([block.name for block in engine.pool.hottest(2)])
    assert engine.load.blocks_used == 2
    for start in range(6):
        unsplit(engine, make_submit(1, [start] * 30, max_tokens=4))
    assert engine.pool.match(names_of(list(range(8)))) == blocks
    engine.check()
    engine.check_idle()
    engine.pinned.release(blocks)
    with pytest.raises(KeyError):
        engine.pinned.pin([bytes(16)])


def test_an_heir_disturbs_nobody_who_runs() -> None:
    source, target = make_engine(), make_engine(blocks=12)
    unsplit(source, make_submit(0, list(range(40))))
    for _ in range(100):
        target.scheduler.admission.note_answer(20)
    target.submit(make_submit(1, [1] * 10, max_tokens=20))  # 3 blocks now, 8 in the end
    target.step()
    hot = source.pool.hottest(50)
    adoption = target.pinned.adopt([block.name for block in hot], [*range(-1, len(hot) - 1)])
    assert [place for place, _ in adoption.wanted] == [0, 1, 2, 3]
    while not target.idle:
        target.step()
        target.check()
    assert target.scheduler.stages.preemptions == 0
    target.pinned.end(adoption, arrived=False)


@pytest.mark.parametrize("parents", [[0], [-2], [-1, -1]])
def test_parents_that_cannot_be_are_refused(parents: list[int]) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="a parent comes before its children"):
        engine.pinned.adopt([bytes(16)], parents)
    engine.check_idle()


def test_old_fame_fades() -> None:
    uses = Uses(fade_after=8)
    uses.stored([b"old"], [None])
    uses.hit([b"old"] * 8)
    uses.stored([b"new"], [None])
    uses.hit([b"new"] * 7)
    assert [block.name for block in uses.hottest(2)] == [b"new", b"old"]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=10), max_size=12),
    blocks=st.integers(6, 20),
    count=st.integers(0, 30),
)
def test_the_hottest_are_closed_under_parents_whatever_was_evicted(
    prompts: list[list[int]], blocks: int, count: int
) -> None:
    engine = make_engine(blocks)
    for prompt in prompts:
        tokens = [token for token in prompt for _ in range(2)]
        unsplit(engine, make_submit(0, tokens, max_tokens=1))
    hot = engine.pool.hottest(count)
    names = [block.name for block in hot]
    assert len(names) == len({*names}) == min(count, engine.pool.cached)
    for place, block in enumerate(hot):
        assert block.parent is None or block.parent in names[:place]
        assert engine.pool.find(block.name) is not None
    migration(engine, make_engine(12), count)


def test_a_pool_without_names_has_nothing_hot() -> None:
    assert BlockPool(4).hottest(3) == []

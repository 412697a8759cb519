"""The block pool against a naive model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.engine.cache.block_pool import BlockPool, Cleared, Removed, Stored

BLOCKS = 8


def name(tokens: tuple[int, ...]) -> bytes:
    return repr(tokens).encode()


class PoolMachine(RuleBasedStateMachine):
    """Sequences are tuples of small numbers, one per block; a block's contents are its whole prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[tuple[tuple[int, ...], list[int]]] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # what was written last into a block
        self.view: dict[bytes, bytes | None] = {}  # what the events say is cached

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def run_sequence(self, tokens: tuple[int, ...]) -> None:
        names = [name(tokens[: i + 1]) for i in range(len(tokens))]
        shared = self.pool.match(names)
        for place, block in enumerate(shared):
            assert self.contents[block] == tokens[: place + 1], "cached contents changed"
        fresh = len(tokens) - len(shared)
        enough = fresh + self.pool.unreferenced(shared) <= self.pool.available
        self.pool.share(shared)
        blocks = self.pool.allocate(fresh)
        assert (blocks is not None) == enough
        if blocks is None:
            self.pool.release(shared)
            return
        for _, others in self.held:
            assert not set(others) & set(blocks), "a block was handed out twice"
        blocks = shared + blocks
        for place in range(len(shared), len(tokens)):
            self.contents[blocks[place]] = tokens[: place + 1]
            parent = names[place - 1] if place else None
            blocks[place] = self.pool.publish(blocks[place], names[place], parent)
            assert self.contents[blocks[place]] == tokens[: place + 1]
        self.held.append((tokens, blocks))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3), keyed=st.booleans())
    def fill_first_blocks_in_one_step(self, tokens: list[int], keyed: bool) -> None:
        blocks = self.pool.allocate(len(tokens))
        if blocks is None:
            return
        names = [name((token,)) for token in tokens]
        for token, block in zip(tokens, blocks, strict=True):
            self.contents[block] = (token,)
        none: list[bytes | None] = [None] * len(tokens)
        used = self.pool.publish_each(blocks, names, none, keyed=[keyed] * len(tokens))
        for token, block in zip(tokens, used, strict=True):
            assert self.contents[block] == (token,)
            self.held.append(((token,), [block]))

    @rule(count=st.integers(1, 3))
    def run_without_names(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is not None:
            for block in blocks:
                self.contents[block] = ()
            self.held.append(((), blocks))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.held:
            place = data.draw(st.integers(0, len(self.held) - 1))
            _, blocks = self.held.pop(place)
            self.pool.release(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear_names()

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.pool.check()
        assert self.pool.used == len({block for _, blocks in self.held for block in blocks})
        assert self.pool.used + self.pool.cached + self.pool.free == BLOCKS

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.pool.take_events():
            match event:
                case Stored(names, parents):
                    for key, parent in zip(names, parents, strict=True):
                        assert key not in self.view
                        self.view[key] = parent
                case Removed(key):
                    del self.view[key]
                case Cleared():
                    self.view.clear()
        names = [n for n in self.view if not self.pool.match([n])]
        assert not names, "an event was lost"

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def bisecting_finds_what_walking_finds(self, tokens: tuple[int, ...]) -> None:
        names = [name(tokens[: i + 1]) for i in range(len(tokens))]
        for most in range(len(names) + 1):
            walked = self.pool.match(names[:most])
            assert self.pool.depth(names, most) == len(walked)
            assert self.pool.unreferenced_of(names, len(walked)) == self.pool.unreferenced(walked)

    @invariant()
    def parents_outlive_their_children(self) -> None:
        for key, parent in self.view.items():
            assert parent is None or parent in self.view, key


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for place, key in enumerate(names):
        pool.publish(blocks[place], key, names[place - 1] if place else None)
    return blocks


def test_tails_are_evicted_before_shared_prefixes() -> None:
    pool = BlockPool(3)
    pool.release(filled(pool, b"a", b"ab", b"abc"))
    assert pool.allocate(1) is not None
    assert len(pool.match([b"a", b"ab", b"abc"])) == 2


def test_least_recently_used_contents_go_first() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, b"a"))
    pool.release(filled(pool, b"b"))
    again = pool.match([b"a"])
    pool.share(again)
    pool.release(again)
    assert pool.allocate(1) is not None
    assert pool.match([b"a"])
    assert not pool.match([b"b"])


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, b"a"))
    assert pool.allocate(1) is not None
    assert pool.match([b"a"])


def test_the_same_contents_are_kept_once() -> None:
    pool = BlockPool(4)
    first = filled(pool, b"a")
    second = pool.allocate(1)
    assert second is not None
    assert pool.publish(second[0], b"a", None) == first[0]
    assert (pool.used, pool.free) == (1, 3)
    pool.release(first)
    assert pool.used == 1
    pool.release(first)
    assert (pool.used, pool.cached) == (0, 1)


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, b"a"))
    pool.take_events()
    assert pool.allocate(3) is None
    assert pool.take_events() == []
    assert (pool.free, pool.cached) == (1, 1)


def test_releasing_twice_is_our_mistake() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)

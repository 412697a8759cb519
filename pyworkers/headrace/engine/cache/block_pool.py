"""Who owns which KV block, and which contents are still in the cache.

A block is *used* (some sequence holds a reference), *cached* (nobody holds it, but its contents have a name and may be
shared again) or *free*. Every block is in exactly one of these states. Contents are named by the chained hash of all
tokens up to the end of the block, so equal names mean equal KV.

A sequence holds the blocks before a named block too, and gives its blocks back last one first: a parent is always
evicted after its children, and what is evicted first is what fewest prompts share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.engine.cache.hot import HotBlock, Uses


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents `names` came into the cache; of each, `parents` names the block before it, `None` at the root."""

    names: list[bytes]
    parents: list[bytes | None]


@dataclass(frozen=True, slots=True)
class Removed:
    """The contents named `name` were evicted."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All names went."""


BlockEvent = Stored | Removed | Cleared


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Every operation costs O(1) for each block that it names."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._unkeyed: set[int] = set()  # named ones without the keys of the layer that drafts
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers go first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._events: list[BlockEvent] = []
        self._uses = Uses(fade_after=4 * num_blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out: the free ones, then the cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of `names` in the cache. Takes no reference."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def depth(self, names: Sequence[bytes], most: int) -> int:
        """How many of the first `most` names `match` would find, in O(log most).

        No name leaves the cache before those that follow it, so the end of the run can be bisected. Where another
        worker lied about what follows what, there may be a gap before that end: then `match` finds fewer.
        """
        block_of = self._block_of
        return bisect_left(names, True, hi=most, key=lambda name: name not in block_of)

    def unreferenced_of(self, names: Sequence[bytes], depth: int) -> int:
        """`unreferenced` of the blocks of `depth` names that `depth` just found, in O(log depth).

        Who holds a named block holds those before it. With a gap, this is only a guess.
        """
        block_of, references = self._block_of, self._references

        def idle(name: bytes) -> bool:
            block = block_of.get(name)
            return block is not None and references[block] == 0

        return depth - bisect_left(names, True, hi=depth, key=idle)

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` would leave `available` if they were shared."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of `blocks`, which came from `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and no contents, or `None` (and no change) where there are too few."""
        if count > self.available:
            return None
        fresh = min(count, len(self._free))
        blocks = self._free[len(self._free) - fresh :]
        blocks.reverse()
        del self._free[len(self._free) - fresh :]
        for _ in range(count - fresh):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def _forget(self, block: int) -> None:
        name = self._name_of[block]
        assert name is not None, "only named blocks are cached"
        self._name_of[block] = None
        del self._block_of[name]
        self._unkeyed.discard(block)
        self._uses.removed(name)
        self._events.append(Removed(name))

    def publish(self, block: int, name: bytes, parent: bytes | None, *, keyed: bool = True) -> int:
        """Name the contents of a full block that the caller holds, so that others can share it.

        Where the cache has these contents already, the caller's reference moves to that block and its own one goes:
        use the returned block from now on. `keyed`: the keys of the layer that drafts are there too, if there is one.
        """
        assert self._references[block] > 0, "only a holder knows the contents"
        known = self._block_of.get(name)
        if known == block:
            return block
        if known is not None:
            self.share([known])
            self.release([block])
            return known
        assert self._name_of[block] is None, "a block has one contents"
        self._name_of[block] = name
        if not keyed:
            self._unkeyed.add(block)
        self._block_of[name] = block
        self._uses.stored([name], [parent])
        self._events.append(Stored([name], [parent]))
        return block

    def publish_each(
        self,
        blocks: list[int],
        names: list[bytes],
        parents: list[bytes | None],
        *,
        keyed: list[bool] | None = None,
    ) -> list[int]:
        """`publish` of many blocks, for one step; all are `keyed` where that is `None`."""
        block_of = self._block_of
        if not block_of.keys().isdisjoint(names) or len(set(names)) < len(names):
            has_keys = keyed or [True] * len(blocks)
            each = zip(blocks, names, parents, has_keys, strict=True)
            return [self.publish(b, name, parent, keyed=k) for b, name, parent, k in each]
        name_of, references = self._name_of, self._references
        assert all(map(references.__getitem__, blocks)), "only a holder knows the contents"
        assert not any(map(name_of.__getitem__, blocks)), "a block has one contents"
        for block, name in zip(blocks, names, strict=True):
            name_of[block] = name
        block_of.update(zip(names, blocks, strict=True))
        if keyed is not None and not all(keyed):
            self._unkeyed.update(
                b for b, has_keys in zip(blocks, keyed, strict=True) if not has_keys
            )
        self._uses.stored(names, parents)
        self._events.append(Stored(names, parents))
        return blocks

    def keyed(self, block: int) -> bool:
        """What `publish` was told of this block, which has a name."""
        return block not in self._unkeyed

    @property
    def all_keyed(self) -> bool:
        """`keyed` holds for every block with a name."""
        return not self._unkeyed

    def find(self, name: bytes) -> int | None:
        """The block with the contents `name`."""
        return self._block_of.get(name)

    def note_use(self, names: Sequence[bytes]) -> None:
        """A sequence was saved from computing the contents `names`."""
        self._uses.hit(names)

    def hottest(self, count: int) -> list[HotBlock]:
        """The most used contents of the cache that are complete, at most `count`; each comes after its parent."""
        chosen: dict[bytes | None, HotBlock] = {}
        for hot in self._uses.hottest(count):
            if self._block_of[hot.name] not in self._unkeyed and (
                hot.parent is None or hot.parent in chosen
            ):
                chosen[hot.name] = hot
        return list(chosen.values())

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`, which stand in sequence order."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "released twice"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._name_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def clear_names(self) -> None:
        """Forget all names: cached blocks become free, used ones stay with their holders."""
        self._free.extend(self._cached)
        self._cached.clear()
        for block in self._block_of.values():
            self._name_of[block] = None
        self._block_of.clear()
        self._unkeyed.clear()
        self._uses.clear()
        self._events = [Cleared()]

    def names(self) -> list[bytes]:
        """Names of all contents in the cache, held or not."""
        return list(self._block_of)

    def take_events(self) -> list[BlockEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self, held: Iterable[int] | None = None) -> None:
        """Assert that every block is in exactly one state, and where `held` lists the blocks of all holders, that
        there is one reference for each of them. Costs O(num_blocks): for tests and shutdown.
        """
        if held is not None:
            references = {block: count for block, count in enumerate(self._references) if count}
            assert Counter(held) == references, "references and holders differ"
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached) and not (free & used) and not (cached & used), (
            "a block is in two states"
        )
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        assert all(self._name_of[block] is None for block in free), "a free block has contents"
        assert all(self._name_of[block] is not None for block in cached), "a cached block has none"
        named = {name: block for block, name in enumerate(self._name_of) if name is not None}
        assert named == self._block_of, "names and blocks differ"
        assert self._unkeyed <= {*named.values()}, "a block without a name lacks keys"

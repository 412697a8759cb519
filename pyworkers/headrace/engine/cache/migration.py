"""Cached blocks that move between workers without a request: those of a leaving one, which its successors adopt.

A successor takes room only where running sequences are not expected to need it, and nothing counts before it is whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.engine.admission import Admission
from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.stages import Stages


@dataclass(frozen=True, slots=True, eq=False)
class Adoption:
    """Blocks for contents that are to be pulled: `wanted` are (place in the names asked for, block here)."""

    wanted: list[tuple[int, int]]
    names: list[bytes]
    parents: list[int]
    known: list[int]  # blocks of names that are here already, held so that they do not make room
    epoch: int  # of the names


class PinnedBlocks:
    """References to blocks of `pool` that no sequence holds."""

    def __init__(self, pool: BlockPool, stages: Stages, admission: Admission) -> None:
        self._pool = pool
        self._stages = stages
        self._admission = admission
        self._held: Counter[int] = Counter()
        self._epoch = 0

    @property
    def held(self) -> Counter[int]:
        """Blocks, each with the number of references."""
        return self._held

    def renamed(self) -> None:
        """Names from before mean nothing any more."""
        self._epoch += 1

    def pin(self, names: list[bytes]) -> list[int]:
        """Keep the blocks of `names`, which `hottest` just gave. Raises `KeyError` where one is not cached."""
        blocks = [self._pool.find(name) for name in names]
        found = [block for block in blocks if block is not None]
        if len(found) < len(names):
            raise KeyError(names[blocks.index(None)])
        self._pool.share(found)
        self._held.update(found)
        return found

    def release(self, blocks: list[int]) -> None:
        """Give back what `pin` gave, parents before children as there: it is read no more."""
        self._held.subtract(blocks)
        assert all(self._held[block] >= 0 for block in blocks), "they are not held here"
        self._held = +self._held
        self._pool.release(blocks)
        self._stages.changed()

    def adopt(self, names: list[bytes], parents: list[int]) -> Adoption:
        """Reserve blocks for those of `names` that are not here, as far as running requests leave room.

        Pull its `wanted` once `StepsInFlight.ended_check` of this moment says so, then call `end`. `parents` are places
        in `names`, -1 at the root. Raises `ValueError` for one that is not before its child.
        """
        keep_free = self._admission.spoken_for
        if len(names) != len(parents) or any(not -1 <= p < i for i, p in enumerate(parents)):
            raise ValueError("a parent comes before its children")
        wanted: list[tuple[int, int]] = []
        known: list[int] = []
        here: list[bool] = []
        for place, (name, parent) in enumerate(zip(names, parents, strict=True)):
            room = self._pool.available > keep_free
            block = self._pool.find(name)
            if not room or (parent >= 0 and not here[parent]):
                here.append(False)
                continue
            here.append(True)
            if block is not None:
                self._pool.share([block])
                known.append(block)
            else:
                fresh = self._pool.allocate(1)
                assert fresh is not None, "there is room"
                wanted.append((place, fresh[0]))
        self._held.update([*known, *(block for _, block in wanted)])
        return Adoption(wanted, names, parents, known, self._epoch)

    def end(self, adoption: Adoption, *, arrived: bool) -> None:
        """The mover has stopped: publish what was pulled, or give the blocks back as they were."""
        ours = [block for _, block in adoption.wanted]
        self._held.subtract([*adoption.known, *ours])
        self._held = +self._held
        blocks: list[int] = []
        for place, block in adoption.wanted:
            if arrived and adoption.epoch == self._epoch:
                parent = adoption.parents[place]
                before = adoption.names[parent] if parent >= 0 else None
                blocks.append(self._pool.publish(block, adoption.names[place], before))
            else:
                blocks.append(block)
        self._pool.release(blocks)
        self._pool.release(adoption.known)
        self._stages.changed()

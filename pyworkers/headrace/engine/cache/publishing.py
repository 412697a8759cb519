"""Which blocks of sequences have names in the pool, and which of their names the running ones will bring there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.lookahead import Lookahead


class Publishing:
    """Names full blocks. It knows the names that are being computed, so that nobody computes them twice."""

    def __init__(self, pool: BlockPool, lookahead: Lookahead) -> None:
        self._pool = pool
        self._lookahead = lookahead
        # Of blocks that running sequences will publish; a pull may last, nobody waits for it.
        self._computing: Counter[bytes] = Counter()

    def comes(self, name: bytes) -> bool:
        """A running sequence computes the contents `name`."""
        return name in self._computing

    def begin(self, names: list[bytes]) -> None:
        """A running sequence will publish these."""
        self._computing.update(names)

    def end(self, names: list[bytes]) -> None:
        """It did, or it does not run any more."""
        for name in names:
            left = self._computing[name] - 1
            if left > 0:
                self._computing[name] = left
            else:
                del self._computing[name]

    def publish(self, sequence: Sequence, full: int) -> bool:
        """Name those of its first `full` blocks that have no name yet. True when another's copy is in use now.

        One whose KV goes to another worker keeps its copies. It holds the others, too: no block leaves the cache
        before those that follow it.
        """
        replaced = False
        for place in range(sequence.published, full):
            name, own = sequence.names[place], sequence.blocks[place]
            known = self._pool.find(name)
            if sequence.export_lease_ms is not None and known is not None:
                if known != own:
                    self._pool.share([known])
                    sequence.twins.append(known)
                continue
            parent = sequence.names[place - 1] if place > 0 else None
            keyed = self._lookahead.has_keys(sequence, place)
            block = self._pool.publish(own, name, parent, keyed=keyed)
            if block != own:
                replaced = True
                sequence.blocks[place] = block
                self._lookahead.exchanged(sequence, place)
        sequence.published = full
        return replaced

    def publish_next(self, sequence: Sequence, name: bytes, *, keyed: bool) -> bool:
        """Name the block after those with names, all of which are published; the caller counts it.

        `name` was not known to be computed. `keyed`: see `BlockPool.publish`. Otherwise as `publish`.
        """
        names = sequence.names
        place = len(names)
        own = sequence.blocks[place]
        block = self._pool.publish(own, name, names[-1] if names else None, keyed=keyed)
        names.append(name)
        if block == own:
            return False
        sequence.blocks[place] = block
        self._lookahead.exchanged(sequence, place)
        return True

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that these are all that compute names."""
        computing = Counter(n for s in running for n in s.names[s.published :])
        assert computing == self._computing, "miscounted what is being computed"

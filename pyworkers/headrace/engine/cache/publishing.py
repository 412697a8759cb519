"""Which blocks of sequences have names in the pool, and which of their names the running ones will bring there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.engine.cache.block_hash import BlockHasher
from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.sequence import Sequence, Stage
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.step.row_counts import Ints, RowCounts


class Publishing:
    """Names full blocks. It knows the names that are being computed, so that nobody computes them twice.

    With `answers_apart` prompts are computed otherwise than answers: then the KV of an answer has other bits than that
    of the same tokens in a prompt, and whoever found it would get another text than without a cache. So only blocks of
    prompts have names.
    """

    def __init__(
        self,
        pool: BlockPool,
        columns: RowCounts,
        lookahead: Lookahead,
        hasher: BlockHasher | None,
        *,
        block_tokens: int,
        answers_apart: bool = False,
    ) -> None:
        """Without a hasher no block has a name: there is no prefix cache."""
        self._pool = pool
        self._columns = columns
        self._lookahead = lookahead
        self._hasher = hasher
        self._block_tokens = block_tokens
        self._answers_apart = answers_apart
        # Of blocks that running sequences will publish; a pull may last, nobody waits for it.
        self._computing: Counter[bytes] = Counter()

    def names_of(self, sequence: Sequence) -> list[bytes]:
        """Of all blocks that its tokens fill, as far as others may share them."""
        return self._names(sequence, 0, self._shareable(sequence, sequence.total))

    def rename(
        self, hasher: BlockHasher, here: Iterable[Sequence], left: Iterable[Sequence]
    ) -> None:
        """Name blocks otherwise from now on; those of sequences that have `left` have no names any more."""
        self._pool.clear_names()
        if self._hasher is None:
            return
        self._hasher = hasher
        here = list(here)
        for sequence in here:
            self._rename(sequence, self.names_of(sequence))
        for sequence in left:
            self._rename(sequence, [])
        for sequence in here:
            self.publish(sequence)

    def _rename(self, sequence: Sequence, names: list[bytes]) -> None:
        if sequence.stage is Stage.RUNNING:
            self.end(sequence.names[sequence.published :])
            self.begin(names)
        sequence.names = names
        sequence.published = 0

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

    def publish(self, sequence: Sequence) -> None:
        """Name the blocks of `sequence` that are full and have no name yet.

        Where others have the same contents, their blocks are in use from now on. One whose KV goes to another worker
        keeps its own. It holds the others, too: no block leaves the cache before those that follow it.
        """
        full = self._shareable(sequence, sequence.computed) // self._block_tokens
        published, named = sequence.published, len(sequence.names)
        if full == published or self._hasher is None:
            return
        sequence.names += self._names(sequence, named, full * self._block_tokens)
        for place in range(published, full):
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
                self._exchange(sequence, place, block)
        sequence.published = full
        if sequence.stage is Stage.RUNNING:
            self.end(sequence.names[published : min(named, full)])

    def publish_rows(self, batch_rows: Ints) -> None:
        """`publish` those with these batch rows.

        A step touches those that have a full block. Nearly all of these decode and have filled the one after all those
        with names: such blocks are named together.
        """
        if self._hasher is None:
            return
        columns = self._columns
        batch_rows, places, follows = columns.core.filled(batch_rows, self._answers_apart)
        if not follows:
            return
        sequences = columns.sequences_of(batch_rows)
        names = [sequence.names for sequence in sequences]
        follows = [
            follow and len(own) == place
            for follow, own, place in zip(follows, names, places.tolist(), strict=True)
        ]
        if not all(follows):
            for sequence, follow in zip(sequences, follows, strict=True):
                if not follow:
                    self.publish(sequence)
            batch_rows, places = batch_rows[follows], places[follows]
            sequences = columns.sequences_of(batch_rows)
            names = [sequence.names for sequence in sequences]
        if sequences:
            self._publish_next(sequences, names, batch_rows, places)

    def _publish_next(
        self, sequences: list[Sequence], names_of: list[list[bytes]], batch_rows: Ints, places: Ints
    ) -> None:
        """Each of these, which have these names, filled its block at its place, the first one without a name."""
        assert self._hasher is not None
        each = zip(sequences, places.tolist(), strict=True)
        blocks = [sequence.blocks[place] for sequence, place in each]
        parents = [names[-1] for names in names_of]
        named = self._hasher.follow_each(parents, self._columns.core.block_at(batch_rows, places))
        keyed = self._lookahead.have_keys(batch_rows, places)
        used = self._pool.publish_each(blocks, named, [*parents], keyed=keyed)
        for names, name in zip(names_of, named, strict=True):
            names.append(name)
        self._columns.published[batch_rows] = places + 1
        if used is not blocks:
            rows = zip(sequences, places.tolist(), blocks, used, strict=True)
            for sequence, place, own, block in rows:
                if block != own:
                    self._exchange(sequence, place, block)

    def _exchange(self, sequence: Sequence, place: int, block: int) -> None:
        """Another one's block has the same contents: use that."""
        sequence.blocks[place] = block
        sequence.blocks_in_table = min(sequence.blocks_in_table, place)
        self._lookahead.exchanged(sequence, place)

    def _shareable(self, sequence: Sequence, tokens: int) -> int:
        """How many of its first `tokens` tokens others may share."""
        return min(tokens, sequence.prompt_len) if self._answers_apart else tokens

    def _names(self, sequence: Sequence, named: int, tokens: int) -> list[bytes]:
        """Of its full blocks from place `named` on, up to `tokens` tokens; those before have theirs."""
        start = named * self._block_tokens
        if self._hasher is None or tokens - start < self._block_tokens:
            return []
        parent = sequence.names[named - 1] if named else None
        return self._hasher.follow(parent, sequence.tokens(start, tokens), sequence.salt)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that these are all that compute names."""
        computing = Counter(n for s in running for n in s.names[s.published :])
        assert computing == self._computing, "miscounted what is being computed"

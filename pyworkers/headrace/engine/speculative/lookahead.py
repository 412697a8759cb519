"""What drafts need of the scheduler: rows, blocks for tokens that may never be, and the keys of the layer that drafts.

Drafts are worth less than anything else. They get rows that decoding and half of the prompts leave, and blocks that no
running sequence needs at once; what they do not get is not drafted, or not checked.

The drafting layer keeps keys in the blocks like any other. Where drafting does not pay, it is not computed, and blocks
are published without them: the pool knows which. A sequence that shares such a block drafts from the keys behind it
only; what goes to another worker is never one of them.
"""

from __future__ import annotations

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.sequence import Sequence
from headrace.engine.step.row_counts import Ints, RowCounts
from headrace.engine.step.work import Work


class Lookahead:
    """What sequences get for drafts, at most `most` for each; none where `most` is 0."""

    def __init__(self, pool: BlockPool, columns: RowCounts, block_tokens: int, most: int) -> None:
        self._pool = pool
        self._columns = columns
        self._block_tokens = block_tokens
        self.most = most
        self.first = most  # for a sequence whose KV came from elsewhere

    def add(self, batch_rows: Ints, rows: int, running: int) -> Ints:
        """How many drafts the decoding sequences at `batch rows` may check, in `rows` at most.

        `running` sequences may each need one more block.
        """
        columns = self._columns
        drafts, lacking, full, most = columns.core.lookahead(batch_rows, rows, self.most)
        if not len(lacking):
            return drafts
        if most > 1 or self._pool.available - len(full) < running:
            for place in lacking.tolist():
                sequence = columns.at(batch_rows.item(place))
                drafts[place] = self._reserve(sequence, drafts.item(place), running)
            return drafts
        # Nearly always: all get what they need, and that is one block each.
        blocks = self._pool.allocate(len(full))
        assert blocks is not None, "they are available"
        for sequence, block in zip(columns.sequences_of(full), blocks, strict=True):
            sequence.blocks.append(block)
        columns.core.hold(full)
        return columns.core.with_room(batch_rows, drafts)

    def begin(self, placed: list[Sequence], rows: int, running: int) -> list[Work]:
        """Decoding of sequences that just took their batch rows with all their KV: they may draft at once."""
        work = [Work.of(sequence, 1, self._columns) for sequence in placed]
        for item in work if self.most > 0 else []:
            sequence = item.sequence
            drafts = min(self.first, rows, sequence.limit - sequence.total - 1)
            if sequence.keys_to != sequence.computed:
                drafts = 0  # nothing is known to draft from
            item.drafts = self._reserve(sequence, max(drafts, 0), running)
            item.begins = item.drafts > 0
            rows -= item.drafts
        return work

    def after_prompt(self, sequence: Sequence, running: int) -> None:
        """The step ends the prompt of `sequence`: the first drafts follow."""
        if self.most > 0:
            self._reserve(sequence, 0, running)

    def whole(self, blocks: list[int]) -> list[int]:
        """Leading `blocks` that have the drafting layer's keys."""
        for place, block in enumerate(blocks):
            if not self._pool.keyed(block):
                return blocks[:place]
        return blocks

    def found(self, sequence: Sequence) -> None:
        """Its first `published` blocks came from the cache."""
        sequence.keys_from, sequence.keys_to = 1, max(sequence.computed, 1)
        if not self._pool.all_keyed:
            for place in range(sequence.published):
                self.exchanged(sequence, place)

    def exchanged(self, sequence: Sequence, place: int) -> None:
        """Another one computed its block at `place`."""
        if not self._pool.keyed(sequence.blocks[place]):
            sequence.keys_from = max(sequence.keys_from, (place + 1) * self._block_tokens)

    def has_keys(self, sequence: Sequence, place: int) -> bool:
        """Whether its full block at `place`, which it computed or pulled, has the drafting layer's keys."""
        start, end = place * self._block_tokens, (place + 1) * self._block_tokens
        return self.most == 0 or (sequence.keys_from <= max(start, 1) and end <= sequence.keys_to)

    def have_keys(self, batch_rows: Ints, places: Ints) -> list[bool]:
        """`has_keys` of one block of each of these batch rows."""
        if self.most == 0:
            return [True] * len(batch_rows)
        # Few of a step: eight calls of numpy take longer.
        width, first, last = self._block_tokens, self._columns.keys_from, self._columns.keys_to
        each = zip(batch_rows.tolist(), places.tolist(), strict=True)
        return [
            first.item(row) <= max(place * width, 1) and (place + 1) * width <= last.item(row)
            for row, place in each
        ]

    def _reserve(self, sequence: Sequence, drafts: int, running: int) -> int:
        """Blocks for the tokens of this step, `drafts` of them drafts, and for the drafts after it.

        Returns how many drafts have room.
        """
        if sequence.export_lease_ms is not None:
            return 0  # it ends with its first token, and its blocks are known to others
        before = sequence.length + sequence.pending_drafts
        known = before + drafts  # tokens whose KV this step writes, if it ends the prompt
        if known + self.most <= len(sequence.blocks) * self._block_tokens:
            return drafts
        wanted = min(known + self.most, sequence.limit)
        missing = -(-wanted // self._block_tokens) - len(sequence.blocks)
        while missing > 0 and self._pool.available > running:
            blocks = self._pool.allocate(1)
            assert blocks is not None, "there is one"
            sequence.hold(blocks)
            missing -= 1
        room = len(sequence.blocks) * self._block_tokens - before
        return max(min(drafts, room), 0)

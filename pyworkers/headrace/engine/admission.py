"""Which waiting sequences get blocks and a batch row, and which blocks: found in the cache, or fresh ones.

- A sequence is admitted only if the pool keeps room for what the running ones are still expected to write. The
  expectation is the mean length of the answers so far, so that admission does not lead to preemption.
- One whose prefix is just being computed waits for that, and others may pass it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.cache.publishing import Publishing
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.stages import Stages
from headrace.wire.frames import QueueRule

QUEUE_RULE: Final[QueueRule] = "halves"  # `chunk_of` and `Scheduler.plan`, as routers replay them
ANSWER_WEIGHT = 1 / 16  # of the newest answer in the mean length; a guess
LOOK_PAST = 64  # waiting sequences passed over in one step because their prefix is being computed
PROMPT_LOGPROBS_CHUNK = 128  # rows of a step whose logits are kept for one prompt; bounds memory


def chunk_of(sequence: Sequence, budget: int, *, contested: bool) -> int:
    """How many tokens of its prompt a step computes, of `budget` that are left; others want some where `contested`."""
    wanted = sequence.remaining
    if sequence.prompt_logprobs is not None:
        wanted = min(wanted, PROMPT_LOGPROBS_CHUNK)
    if wanted <= budget:
        return wanted
    return (budget + 1) // 2 if contested else budget


class Admission:
    """Lets sequences start, as far as batch rows, budget and pool last."""

    def __init__(
        self,
        pool: BlockPool,
        stages: Stages,
        lookahead: Lookahead,
        publishing: Publishing,
        *,
        block_tokens: int,
    ) -> None:
        self._pool = pool
        self._stages = stages
        self._lookahead = lookahead
        self._publishing = publishing
        self._block_tokens = block_tokens
        self._expected_answer = 0.0
        self.lacks_blocks = False  # the first to wait found too few in the last plan
        self.held = False

    @property
    def spoken_for(self) -> int:
        """Blocks that those who have some are still expected to ask for."""
        others = sum(
            self._blocks_to_come(other) for other in (*self._stages.ready, *self._stages.parked)
        )
        columns, batch_rows = self._stages.columns, self._stages.batch_rows
        prompts, limits = columns.prompt_len[batch_rows], columns.limit[batch_rows]
        answers = columns.total[batch_rows] - prompts + self._block_tokens
        expected = np.maximum(answers, int(self._expected_answer))
        blocks = -(-np.minimum(limits, prompts + expected) // self._block_tokens)
        more = np.maximum(blocks - columns.held[batch_rows], 0)
        more[columns.exports_kv[batch_rows]] = 0
        return others + int(more.sum())

    def note_answer(self, tokens: int) -> None:
        """An answer ended after `tokens`; the next ones are expected to be like it."""
        self._expected_answer += (tokens - self._expected_answer) * ANSWER_WEIGHT

    def admit(
        self,
        prompts: list[tuple[Sequence, int]],
        placed: list[Sequence],
        reserved: list[Sequence],
        budget: int,
        *,
        new: bool = True,
    ) -> int:
        """Let ready and waiting sequences go on while batch rows, budget and pool last; returns the budget left.

        Without `new` no prompt of a request without an answer begins; `held` says whether one could have.
        """
        self.held = False
        to_come: int | None = None
        passed = 0  # blocks of those that only lack a batch row: who is passed over loses none
        place = 0
        waiting, ready, free_rows = self._stages.waiting, self._stages.ready, self._stages.free_rows
        while place < min(len(waiting), LOOK_PAST):
            sequence = waiting[place]
            if ready and free_rows and budget > 0 and ready[0].order < sequence.order:
                if not self._place_ready(placed):
                    break
                budget -= 1
                continue
            can_start = budget > 0 and bool(free_rows)
            if not can_start and not self._stages.importing:
                break
            credit = self._creditable(sequence)
            depth = self._depth(sequence, credit)
            hurried = sequence.kv_import is not None and sequence.kv_import.continued is not None
            if depth < credit and self._publishing.comes(sequence.names[depth]) and not hurried:
                place += 1  # its next block is being computed: share it then
                continue
            if to_come is None:
                to_come = self.spoken_for
            tokens = sequence.total if sequence.kv_import is None else sequence.kv_import.tokens
            fresh = self._blocks(tokens) - depth
            needed = fresh + self._pool.unreferenced_of(sequence.names, depth)
            room = self._pool.available - to_come - passed
            if needed > room:
                self.lacks_blocks = place == 0
                break  # a smaller one behind it must not starve it
            held = can_start and not new and sequence.total == sequence.prompt_len
            if sequence.kv_import is None and (held or not can_start):
                self.held |= held
                passed += needed
                place += 1
                continue
            shared = self._pool.match(sequence.names[:depth])
            fresh += depth - len(shared)  # where the cache has gaps, all of this was a guess
            if fresh + self._pool.unreferenced(shared) > room:
                self.lacks_blocks = place == 0
                break
            waiting.pop(place)
            self._take_blocks(sequence, shared, fresh)
            to_come += self._blocks_to_come(sequence)
            if sequence.kv_import is not None:
                self._stages.park_reserved(sequence)
                reserved.append(sequence)
            else:
                self._stages.take_row(sequence)
                count = chunk_of(sequence, budget, contested=place < len(waiting))
                budget -= count
                prompts.append((sequence, count))
        while ready and free_rows and budget > 0 and self._place_ready(placed):
            budget -= 1
        return budget

    def lacks(self, sequence: Sequence) -> int:
        """Tokens that one that waits would have to compute if it began now."""
        depth = self._depth(sequence, self._creditable(sequence))
        return sequence.total - depth * self._block_tokens

    def _place_ready(self, placed: list[Sequence]) -> bool:
        """Let the first ready sequence run. False when it has to wait for a block."""
        sequence = self._stages.ready[0]
        missing = self._blocks(sequence.total) - len(sequence.blocks)
        while missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is not None:
                sequence.hold(blocks)
                break
            if self._stages.running:
                return False  # they end, or give way
            victim = self._stages.ready[-1]
            self._stages.preempt(victim)
            if victim is sequence:
                return False
        self._stages.ready.pop(0)
        self._stages.take_row(sequence)
        placed.append(sequence)
        return True

    def _creditable(self, sequence: Sequence) -> int:
        """How many leading blocks may come from the cache: never the one of the last token, whose
        logits choose the next one; unless that is chosen elsewhere, where the KV comes from. With prompt
        log-probabilities or a mean of all rows none: every row is wanted.
        """
        wants_all = sequence.pooled is not None and sequence.pooled.wants_all
        if sequence.prompt_logprobs is not None or wants_all:
            return 0
        tokens = sequence.total - 1 if sequence.kv_import is None else sequence.kv_import.tokens
        return min(tokens // self._block_tokens, len(sequence.names))

    def _depth(self, sequence: Sequence, credit: int) -> int:
        """How many of its first `credit` blocks it finds in the cache. Many wait, and each is asked in each step: a
        long prefix must not be walked for that.
        """
        depth = self._pool.depth(sequence.names, credit)
        if sequence.export_lease_ms is None or self._pool.all_keyed:
            return depth
        return len(self._lookahead.whole(self._pool.match(sequence.names[:depth])))

    def _take_blocks(self, sequence: Sequence, shared: list[int], fresh: int) -> None:
        self._pool.share(shared)
        self._pool.note_use(sequence.names[: len(shared)])
        blocks = self._pool.allocate(fresh)
        assert blocks is not None, "the caller counted"
        sequence.hold(shared + blocks)
        sequence.published = len(shared)
        sequence.computed = len(shared) * self._block_tokens
        self._lookahead.found(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that a sequence is expected to ask for; at least one while it may ask at all."""
        if sequence.export_lease_ms is not None:
            return 0  # it ends with its first token
        answer = sequence.total - sequence.prompt_len
        expected = max(int(self._expected_answer), answer + self._block_tokens)
        length = min(sequence.limit, sequence.prompt_len + expected)
        return max(self._blocks(length) - len(sequence.blocks), 0)

"""Which sequences get how many tokens in the next step. Pure: no clock, no tensors.

There are no prefill and decode modes. A sequence is its tokens and how many of them are computed; a step hands out
a budget of tokens: one to each sequence that decodes, the rest to prompts, first come first served. Four rules make
that fair and steady:

- A prompt that does not fit in the rest of the budget takes at most half of it while others wait, so a long prompt
  delays short ones by a step or two, and it never delays decoding.
- Where the pool is full, the newest sequence of the lowest priority gives its blocks back and waits again. Its tokens
  stay; computing them again yields the same KV, so its answer is the same.
- A sequence is admitted only if the pool keeps room for what the running ones are still expected to write. The
  expectation is the mean length of the answers so far, so that admission does not lead to preemption.
- A sequence below normal priority runs where nobody else would: while such sequences hold more than half of the batch
  rows, a normal one that finds no batch row or no blocks gets those of the newest of them, one in a step. The other
  half is theirs, so that nobody starves. The router gives that priority to the many answers of one tenant.

Sequences whose KV moves between workers have blocks without a batch row for a while. One whose KV comes waits for
blocks in order with the others, then it is parked until all is there, then it is ready for a batch row. One whose KV
goes is parked from its first token on, and nothing takes its blocks before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.cache.publishing import Publishing
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.sequence import Sequence, Stage
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.step.row_counts import Ints, RowCounts
from headrace.engine.step.work import StepWork, Work

ANSWER_WEIGHT = 1 / 16  # of the newest answer in the mean length; a guess
LOOK_PAST = 64  # waiting sequences passed over in one step because their prefix is being computed
PROMPT_LOGPROBS_CHUNK = 128  # rows of a step whose logits are kept for one prompt; bounds memory


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its work, decoding sequences first, which of them took a batch row just now, which got blocks for KV
    that comes from elsewhere.
    """

    work: StepWork
    admitted: list[Sequence]
    reserved: list[Sequence] = field(default_factory=list[Sequence])


class Scheduler:
    """Sequences over one pool. `running`, `waiting` and `ready` are sorted by `Sequence.order`."""

    def __init__(
        self,
        pool: BlockPool,
        columns: RowCounts,
        lookahead: Lookahead,
        publishing: Publishing,
        *,
        block_tokens: int,
        max_sequences: int,
        max_batched_tokens: int,
        max_waiting: int,
    ) -> None:
        assert max_batched_tokens >= max_sequences > 0, "each running sequence decodes in each step"
        self.pool = pool
        self.block_tokens = block_tokens
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.max_waiting = max_waiting
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.parked: set[Sequence] = set()
        self.preemptions = 0
        self.columns = columns
        self.lookahead = lookahead
        self.publishing = publishing
        self._stalled = False  # a plan would be empty until something changes
        self._lacks_blocks = False  # the first to wait found too few in the last plan
        self._importing = 0  # of those who wait, how many wait for blocks only
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._in_order: Ints | None = None  # the batch rows of `running`, unless that changed
        self._expected_answer = 0.0

    @property
    def idle(self) -> bool:
        """There is nothing to compute until something new comes, or parked sequences move on."""
        return not self.running and (self._stalled or not (self.waiting or self.ready))

    @property
    def empty(self) -> bool:
        """No sequence is here."""
        return not (self.running or self.waiting or self.ready or self.parked)

    def add(self, sequence: Sequence) -> None:
        """Let `sequence` wait. Raises `RequestError` when `max_waiting` already do."""
        self.check_queue(0)
        self.wait(sequence)

    def check_queue(self, others: int) -> None:
        """Raises `RequestError` when `max_waiting` sequences wait, here or as one of `others`."""
        waiting = len(self.waiting) + others
        if waiting >= self.max_waiting:
            raise RequestError(
                FailureKind.QUEUE_FULL,
                f"{waiting} requests wait, the limit is {self.max_waiting}",
            )

    def wait(self, sequence: Sequence) -> None:
        """Let `sequence`, which is outside, wait."""
        assert sequence.stage is Stage.OUTSIDE
        insort(self.waiting, sequence, key=_order)
        self._importing += sequence.kv_import is not None
        sequence.stage = Stage.WAITING
        self._stalled = False

    def remove(self, sequence: Sequence) -> int:
        """Take a sequence out at any stage; returns how many blocks it gave back."""
        self._stalled = False
        match sequence.stage:
            case Stage.OUTSIDE:
                pass
            case Stage.WAITING:
                _take_out(self.waiting, sequence)
                self._importing -= sequence.kv_import is not None
            case Stage.RUNNING:
                self._give_up_row(sequence)
            case Stage.PARKED:
                self.parked.remove(sequence)
            case Stage.READY:
                _take_out(self.ready, sequence)
        sequence.stage = Stage.OUTSIDE
        return self._give_back(sequence)

    def park(self, sequence: Sequence) -> None:
        """A running sequence leaves the batch and keeps its blocks."""
        self._give_up_row(sequence)
        self.parked.add(sequence)
        sequence.stage = Stage.PARKED

    def unpark(self, sequence: Sequence) -> None:
        """A parked sequence has all its KV: it may decode."""
        assert sequence.stage is Stage.PARKED
        self.parked.remove(sequence)
        insort(self.ready, sequence, key=_order)
        sequence.stage = Stage.READY
        self._stalled = False

    @property
    def spoken_for(self) -> int:
        """Blocks that those who have some are still expected to ask for."""
        others = sum(self._blocks_to_come(other) for other in (*self.ready, *self.parked))
        columns, batch_rows = self.columns, self.batch_rows
        prompts, limits = columns.prompt_len[batch_rows], columns.limit[batch_rows]
        answers = columns.total[batch_rows] - prompts + self.block_tokens
        expected = np.maximum(answers, int(self._expected_answer))
        blocks = -(-np.minimum(limits, prompts + expected) // self.block_tokens)
        more = np.maximum(blocks - columns.held[batch_rows], 0)
        more[columns.exports_kv[batch_rows]] = 0
        return others + int(more.sum())

    @property
    def kv_import(self) -> int:
        """Of those who wait, how many wait for blocks only."""
        return self._importing

    @property
    def batch_rows(self) -> Ints:
        """Those of `running`, in its order."""
        if self._in_order is None:
            batch_rows = [sequence.batch_row for sequence in self.running]
            self._in_order = np.array(batch_rows, dtype=np.int64)
        return self._in_order

    def changed(self) -> None:
        """There may be more room than at the last plan."""
        self._stalled = False

    def note_answer(self, tokens: int) -> None:
        """An answer ended after `tokens`; the next ones are expected to be like it."""
        self._expected_answer += (tokens - self._expected_answer) * ANSWER_WEIGHT

    def plan(self) -> Plan:
        """What the next step computes; all blocks for it are allocated.

        There is work as long as something runs; and as something waits, unless what is parked leaves no room.
        """
        self._make_way()
        preemptions = self.preemptions
        decodes, prefills = self._plan_decodes()
        budget = self.max_batched_tokens - len(decodes)
        drafts = np.zeros(len(decodes), dtype=np.int64)
        if self.lookahead.most > 0:
            contested = bool(prefills or self.waiting or self.ready)
            rows = budget // 2 if contested else budget
            drafts = self.lookahead.add(decodes, rows, len(self.running))
            budget -= int(drafts.sum())
        work = StepWork.decoding(decodes, drafts, self.columns)
        prompts: list[tuple[Sequence, int]] = []  # with how many tokens
        for place, sequence in enumerate(prefills):
            contested = place + 1 < len(prefills) or bool(self.waiting)
            count = self._chunk(sequence, budget, contested=contested)
            budget -= count
            if count > 0:
                prompts.append((sequence, count))
        decided = len(prompts)
        placed: list[Sequence] = []
        reserved: list[Sequence] = []
        if preemptions == self.preemptions:  # what was just preempted would come straight back
            budget = self._admit(prompts, placed, reserved, budget)
        admitted = placed + [sequence for sequence, _ in prompts[decided:]]
        for place, (sequence, count) in enumerate(prompts):  # what nobody else wanted
            more = self._chunk(sequence, count + budget, contested=False)
            if more > count:
                budget -= more - count
                prompts[place] = sequence, more
        for sequence, count in prompts:
            if count == sequence.remaining:
                self.lookahead.after_prompt(sequence, len(self.running))
        listed = self.lookahead.begin(placed, budget, len(self.running))
        listed += [Work.of(sequence, count, self.columns) for sequence, count in prompts]
        if listed:
            work = work.then(StepWork.listed(listed))
        self._stalled = not len(work) and preemptions == self.preemptions
        return Plan(work, admitted, reserved)

    def _make_way(self) -> None:
        """Preempt one below normal priority, if one that is not waits for a batch row or for blocks."""
        lacks, self._lacks_blocks = not self._free_rows or self._lacks_blocks, False
        first = min(
            (queue[0] for queue in (self.waiting, self.ready) if queue), key=_order, default=None
        )
        if not lacks or first is None or first.priority < 0:
            return
        low = len(self.running) - bisect_right(self.running, 0, key=lambda s: -s.priority)
        if low <= self.max_sequences // 2:
            return
        victims = (s for s in self.running[-low:] if s.export_lease_ms is None)
        if victim := max(victims, key=_order, default=None):
            self._preempt(victim)

    def _plan_decodes(self) -> tuple[Ints, list[Sequence]]:
        """The batch rows of those that decode, each of which has room for its token, and those with more to compute."""
        columns, batch_rows = self.columns, self.batch_rows
        reached = columns.reached(batch_rows)
        remaining = columns.length(batch_rows) - reached
        decode = remaining == 1
        prefills = columns.sequences_of(batch_rows[remaining > 1])
        if columns.pending_tokens.any():
            decode &= ~columns.ends(batch_rows)
        decodes = batch_rows[decode]
        last = reached[decode] + columns.pending_drafts[decodes]
        last = np.minimum(last, columns.limit[decodes] - 1)
        missing = last // self.block_tokens + 1 - columns.held[decodes]
        full = decodes[missing > 0]
        if not len(full):
            return decodes, prefills
        if missing.max() == 1 and (blocks := self.pool.allocate(len(full))) is not None:
            for sequence, block in zip(columns.sequences_of(full), blocks, strict=True):
                sequence.blocks.append(block)
            columns.held[full] += 1
            return decodes, prefills
        for sequence in columns.sequences_of(full):
            if sequence.stage is Stage.RUNNING:  # preemption takes from the end
                self._ensure_block(sequence)
        prefills = [sequence for sequence in prefills if sequence.stage is Stage.RUNNING]
        return decodes[columns.taken[decodes]], prefills

    def _ensure_block(self, sequence: Sequence) -> None:
        """Make room for one more token, wherever it comes to stand; or the sequence itself had to go."""
        last = min(sequence.reached + sequence.pending_drafts, sequence.limit - 1)
        while len(sequence.blocks) * self.block_tokens <= last:
            if (blocks := self.pool.allocate(1)) is not None:
                sequence.hold(blocks)
                continue
            # One whose KV goes to another worker keeps it; the sequence that asks is none of those.
            victim = next(s for s in reversed(self.running) if s.export_lease_ms is None)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.prompt_logprobs is not None and not sequence.pending_tokens:
            sequence.prompt_logprobs = []  # they start again with the prompt
        self.remove(sequence)
        self.preemptions += 1
        self.wait(sequence)

    def _chunk(self, sequence: Sequence, budget: int, *, contested: bool) -> int:
        wanted = sequence.remaining
        if sequence.prompt_logprobs is not None:
            wanted = min(wanted, PROMPT_LOGPROBS_CHUNK)
        if wanted <= budget:
            return wanted
        return (budget + 1) // 2 if contested else budget

    def _admit(
        self,
        prompts: list[tuple[Sequence, int]],
        placed: list[Sequence],
        reserved: list[Sequence],
        budget: int,
    ) -> int:
        """Let ready and waiting sequences go on while batch rows, budget and pool last; returns the budget left."""
        to_come: int | None = None
        passed = (
            0  # blocks of those that only lack a batch row: who is passed over loses none by it
        )
        place = 0
        while place < min(len(self.waiting), LOOK_PAST):
            sequence = self.waiting[place]
            if (
                self.ready
                and self._free_rows
                and budget > 0
                and _order(self.ready[0]) < sequence.order
            ):
                if not self._place_ready(placed):
                    break
                budget -= 1
                continue
            can_start = budget > 0 and bool(self._free_rows)
            if not can_start and not self._importing:
                break
            credit = self._creditable(sequence)
            depth = self._depth(sequence, credit)
            late = sequence.kv_import is not None and sequence.kv_import.going
            if depth < credit and self.publishing.comes(sequence.names[depth]) and not late:
                place += 1  # its next block is being computed: share it then
                continue
            if to_come is None:
                to_come = self.spoken_for
            tokens = sequence.total if sequence.kv_import is None else sequence.kv_import.tokens
            fresh = self._blocks(tokens) - depth
            needed = fresh + self.pool.unreferenced_of(sequence.names, depth)
            room = self.pool.available - to_come - passed
            if needed > room:
                self._lacks_blocks = place == 0
                break  # a smaller one behind it must not starve it
            if sequence.kv_import is None and not can_start:
                passed += needed
                place += 1
                continue
            shared = self.pool.match(sequence.names[:depth])
            fresh += depth - len(shared)  # where the cache has gaps, all of this was a guess
            if fresh + self.pool.unreferenced(shared) > room:
                self._lacks_blocks = place == 0
                break
            self.waiting.pop(place)
            self._take_blocks(sequence, shared, fresh)
            to_come += self._blocks_to_come(sequence)
            if sequence.kv_import is not None:
                self._importing -= 1
                self.parked.add(sequence)
                sequence.stage = Stage.PARKED
                reserved.append(sequence)
            else:
                self._take_row(sequence)
                count = self._chunk(sequence, budget, contested=place < len(self.waiting))
                budget -= count
                prompts.append((sequence, count))
        while self.ready and self._free_rows and budget > 0 and self._place_ready(placed):
            budget -= 1
        return budget

    def _place_ready(self, placed: list[Sequence]) -> bool:
        """Let the first ready sequence run. False when it has to wait for a block."""
        sequence = self.ready[0]
        missing = self._blocks(sequence.total) - len(sequence.blocks)
        while missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                sequence.hold(blocks)
                break
            if self.running:
                return False  # they end, or give way
            victim = self.ready[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self.ready.pop(0)
        self._take_row(sequence)
        placed.append(sequence)
        return True

    def _creditable(self, sequence: Sequence) -> int:
        """How many leading blocks may come from the cache: never the one of the last token, whose
        logits choose the next one; unless that is chosen elsewhere, where the KV comes from. With prompt
        log-probabilities none: every row is wanted.
        """
        if sequence.prompt_logprobs is not None:
            return 0
        tokens = sequence.total - 1 if sequence.kv_import is None else sequence.kv_import.tokens
        return min(tokens // self.block_tokens, len(sequence.names))

    def _depth(self, sequence: Sequence, credit: int) -> int:
        """How many of its first `credit` blocks it finds in the cache. Many wait, and each is asked in each step: a
        long prefix must not be walked for that.
        """
        depth = self.pool.depth(sequence.names, credit)
        if sequence.export_lease_ms is None or self.pool.all_keyed:
            return depth
        return len(self.lookahead.whole(self.pool.match(sequence.names[:depth])))

    def _take_blocks(self, sequence: Sequence, shared: list[int], fresh: int) -> None:
        self.pool.share(shared)
        self.pool.note_use(sequence.names[: len(shared)])
        blocks = self.pool.allocate(fresh)
        assert blocks is not None, "the caller counted"
        sequence.hold(shared + blocks)
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.block_tokens
        self.lookahead.found(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)

    def _take_row(self, sequence: Sequence) -> None:
        self.columns.take(sequence, self._free_rows.pop())
        sequence.blocks_in_table = 0
        sequence.stage = Stage.RUNNING
        insort(self.running, sequence, key=_order)
        self._in_order = None
        self.publishing.begin(sequence.names[sequence.published :])

    def _give_up_row(self, sequence: Sequence) -> None:
        _take_out(self.running, sequence)
        self._in_order = None
        self.publishing.end(sequence.names[sequence.published :])
        self._free_rows.append(self.columns.leave(sequence))

    def _give_back(self, sequence: Sequence) -> int:
        released = len(sequence.blocks)
        self.pool.release(sequence.blocks)
        self.pool.release(sequence.twins)  # after their children
        sequence.blocks = []
        sequence.twins = []
        sequence.held = 0
        sequence.computed = sequence.published = sequence.drafts = 0
        sequence.pending_rows = sequence.pending_tokens = sequence.pending_drafts = 0
        return released

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that a sequence is expected to ask for; at least one while it may ask at all."""
        if sequence.export_lease_ms is not None:
            return 0  # it ends with its first token
        answer = sequence.total - sequence.prompt_len
        expected = max(int(self._expected_answer), answer + self.block_tokens)
        length = min(sequence.limit, sequence.prompt_len + expected)
        return max(self._blocks(length) - len(sequence.blocks), 0)

    def check(self, others: Iterable[int] = ()) -> None:
        """Assert what must hold between steps, and that an idle scheduler holds nothing. `others` are blocks that are
        held for no sequence, once for each time.
        """
        held = [*others]
        for sequence in (*self.running, *self.ready, *self.parked):
            held += sequence.blocks + sequence.twins
        self.pool.check(held)
        for sequences in (self.running, self.waiting, self.ready):
            assert sequences == sorted(sequences, key=_order), "sequences are not in order"
        batch_rows = [sequence.batch_row for sequence in self.running]
        assert len({*batch_rows, *self._free_rows}) == self.max_sequences, (
            "a batch row is taken twice or lost"
        )
        kv_import = sum(sequence.kv_import is not None for sequence in self.waiting)
        assert kv_import == self._importing, "miscounted who waits for blocks only"
        assert [*self.batch_rows] == batch_rows, "batch rows are not in order"
        self.columns.check()
        self.publishing.check(self.running)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    place = bisect_left(sequences, sequence.order, key=_order)
    assert sequences[place] is sequence
    del sequences[place]

"""Which sequences get how many tokens in the next step. Pure: no clock, no tensors.

There are no prefill and decode modes. A sequence is its tokens and how many of them are computed; a step hands out
a budget of tokens: one to each sequence that decodes, the rest to prompts, first come first served. These rules, and
those of `Admission`, make that fair and steady:

- A prompt that does not fit in the rest of the budget takes at most half of it while others wait, so a long prompt
  delays short ones by a step or two, and it never delays decoding.
- Where the pool is full, the newest sequence of the lowest priority gives its blocks back and waits again. Its tokens
  stay; computing them again yields the same KV, so its answer is the same.
- A sequence below normal priority runs where nobody else would: while such sequences hold more than half of the batch
  rows, a normal one that finds no batch row or no blocks gets those of the newest of them, one in a step. The other
  half is theirs, so that nobody starves. The router gives that priority to the many answers of one tenant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.admission import Admission, chunk_of
from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.prompt_balance import PromptBalance
from headrace.engine.sequence import Sequence, Stage
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.stages import Stages, by_order
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.work import StepWork, Work


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its work, decoding sequences first, which of them took a batch row just now, which got blocks for KV
    that comes from elsewhere.
    """

    work: StepWork
    admitted: list[Sequence]
    reserved: list[Sequence] = field(default_factory=list[Sequence])


class Scheduler:
    """Plans steps for the sequences of `stages`, over one pool."""

    def __init__(
        self,
        pool: BlockPool,
        stages: Stages,
        admission: Admission,
        lookahead: Lookahead,
        *,
        block_tokens: int,
        max_batched_tokens: int,
        balance: PromptBalance | None = None,
    ) -> None:
        """In a group `balance` says when new prompts may begin."""
        self.max_sequences = len(stages.columns.taken)
        assert max_batched_tokens >= self.max_sequences, (
            "each running sequence decodes in each step"
        )
        self.pool = pool
        self.stages = stages
        self.admission = admission
        self.lookahead = lookahead
        self._balance = balance
        self.holds_prompts = False  # in the last plan: new ones wait for those of other ranks
        self._block_tokens = block_tokens
        self.max_batched_tokens = max_batched_tokens

    def plan(self) -> Plan:
        """What the next step computes; all blocks for it are allocated.

        There is work as long as something runs; and as something waits, unless what is parked leaves no room.
        """
        self._make_way()
        preemptions = self.stages.preemptions
        decodes, prefills = self._plan_decodes()
        budget = self.max_batched_tokens - len(decodes)
        drafts = np.zeros(len(decodes), dtype=np.int64)
        if self.lookahead.most > 0:
            contested = bool(prefills or self.stages.waiting or self.stages.ready)
            rows = budget // 2 if contested else budget
            drafts = self.lookahead.add(decodes, rows, len(self.stages.running))
            budget -= int(drafts.sum())
        work = StepWork.decoding(decodes, drafts, self.stages.columns)
        prompts: list[tuple[Sequence, int]] = []  # with how many tokens
        for place, sequence in enumerate(prefills):
            contested = place + 1 < len(prefills) or bool(self.stages.waiting)
            count = chunk_of(sequence, budget, contested=contested)
            budget -= count
            if count > 0:
                prompts.append((sequence, count))
        decided = len(prompts)
        placed: list[Sequence] = []
        reserved: list[Sequence] = []
        self.holds_prompts = False
        if (
            preemptions == self.stages.preemptions
        ):  # what just lost its row would come straight back
            holds = self._balance is not None and not self._balance.open and not prefills
            budget = self.admission.admit(prompts, placed, reserved, budget, new=not holds)
            self.holds_prompts = holds and self.admission.held
        admitted = placed + [sequence for sequence, _ in prompts[decided:]]
        for place, (sequence, count) in enumerate(prompts):  # what nobody else wanted
            more = chunk_of(sequence, count + budget, contested=False)
            if more > count:
                budget -= more - count
                prompts[place] = sequence, more
        for sequence, count in prompts:
            if count == sequence.remaining:
                self.lookahead.after_prompt(sequence, len(self.stages.running))
        listed = self.lookahead.begin(placed, budget, len(self.stages.running))
        listed += [Work.of(sequence, count, self.stages.columns) for sequence, count in prompts]
        if listed:
            work = work.then(StepWork.listed(listed))
        unchanged = preemptions == self.stages.preemptions and not self.holds_prompts
        self.stages.stalled = not len(work) and unchanged
        return Plan(work, admitted, reserved)

    def _make_way(self) -> None:
        """Preempt one below normal priority, if one that is not waits for a batch row or for blocks."""
        stages, running = self.stages, self.stages.running
        lacks = not stages.free_rows or self.admission.lacks_blocks
        self.admission.lacks_blocks = False
        firsts = (queue[0] for queue in (stages.waiting, stages.ready) if queue)
        first = min(firsts, key=by_order, default=None)
        if not lacks or first is None or first.priority < 0:
            return
        low = len(running) - bisect_right(running, 0, key=lambda s: -s.priority)
        if low <= self.max_sequences // 2:
            return
        victims = (s for s in running[-low:] if s.export_lease_ms is None)
        if victim := max(victims, key=by_order, default=None):
            stages.preempt(victim)

    def _plan_decodes(self) -> tuple[Ints, list[Sequence]]:
        """The batch rows of those that decode, each of which has room for its token, and those with more to compute."""
        columns, batch_rows = self.stages.columns, self.stages.batch_rows
        some, others, full, most = columns.core.plan(batch_rows)
        decodes = batch_rows if some is None else some
        prefills = [columns.at(batch_row) for batch_row in others]
        if not len(full):
            return decodes, prefills
        if most == 1 and (blocks := self.pool.allocate(len(full))) is not None:
            for sequence, block in zip(columns.sequences_of(full), blocks, strict=True):
                sequence.blocks.append(block)
            columns.core.hold(full)
            return decodes, prefills
        for sequence in columns.sequences_of(full):
            if sequence.stage is Stage.RUNNING:  # preemption takes from the end
                self._ensure_block(sequence)
        prefills = [sequence for sequence in prefills if sequence.stage is Stage.RUNNING]
        return decodes[columns.taken[decodes]], prefills

    def _ensure_block(self, sequence: Sequence) -> None:
        """Make room for one more token, wherever it comes to stand; or the sequence itself had to go."""
        last = min(sequence.reached + sequence.pending_drafts, sequence.limit - 1)
        while len(sequence.blocks) * self._block_tokens <= last:
            if (blocks := self.pool.allocate(1)) is not None:
                sequence.hold(blocks)
                continue
            # One whose KV goes to another worker keeps it; the sequence that asks is none of those.
            victim = next(s for s in reversed(self.stages.running) if s.export_lease_ms is None)
            self.stages.preempt(victim)
            if victim is sequence:
                return

    def check(self, others: Iterable[int] = ()) -> None:
        """Assert what must hold between steps, and that an idle scheduler holds nothing. `others` are blocks that are
        held for no sequence, once for each time.
        """
        self.pool.check([*others, *self.stages.held()])
        self.stages.check()

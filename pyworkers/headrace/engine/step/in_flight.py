"""The steps in flight: how a step is planned and ordered, and what becomes of its sequences once it ran.

At most two, which end in the order of their beginning. What the first one brings is not known when the second one is
planned: sequences say what is coming (`Sequence.pending_*`), and here that is added up and taken off again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.engine.cache.kv_export import KvExports
from headrace.engine.cache.kv_import import KvImports
from headrace.engine.cache.publishing import Publishing
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.outputs import OutputBuilder
from headrace.engine.requests import Requests
from headrace.engine.result import StepResult
from headrace.engine.scheduler import Plan, Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.step.forward import Forward
from headrace.engine.step.input_batch import AddedRow, GrownTables, TableUpdate
from headrace.engine.step.rounds import Rounds
from headrace.engine.step.rows import places_of
from headrace.engine.step.step import Computed, EngineStep
from headrace.engine.step.work import Work
from headrace_kernels.moe.transport import RankLost, StepAborted

log = logging.getLogger(__name__)


class StepsInFlight:
    """Begins steps and finishes them: the part of an engine that a step goes through."""

    def __init__(
        self,
        scheduler: Scheduler,
        forward: Forward,
        requests: Requests,
        outputs: OutputBuilder,
        *,
        kv_imports: KvImports,
        kv_exports: KvExports,
        publishing: Publishing,
        rounds: Rounds | None = None,
    ) -> None:
        self._rounds = rounds
        self._scheduler = scheduler
        self._forward = forward
        self._requests = requests
        self._outputs = outputs
        self._kv_imports = kv_imports
        self._kv_exports = kv_exports
        self._publishing = publishing
        self._in_flight: deque[EngineStep] = deque()
        self.finished = 0  # steps so far

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def reads_late(self) -> bool:
        """A step that ran may still be computed: reading it takes time, and the next one can run meanwhile."""
        return self._forward.returns_early

    def ended_check(self) -> Callable[[], bool]:
        """Says whether the steps that are in flight now have ended: they may write to blocks that are free by now."""
        last = self.finished + len(self)
        return lambda: self.finished >= last

    @property
    def may_begin(self) -> bool:
        """A step can be planned now: none is in flight, or one whose end it need not know."""
        return not self._in_flight or (len(self._in_flight) == 1 and not self._in_flight[0].last)

    def begin(self, result: StepResult | None = None) -> EngineStep | None:
        """Plan a step: run it, after those that began before, then `finish` it. `None` where nothing can be computed.

        Its result is `result`, if there is one.
        """
        assert self.may_begin, "finish what is in flight"
        plan = self._scheduler.plan()
        self._kv_imports.reserved(plan.reserved, self.ended_check())
        if not len(plan.work):
            if self._in_flight:
                # One that just lost its batch row may have a token coming, and is not planned without it.
                self._in_flight[-1].last = True
            self.tell_waiting()
            return None
        self._kv_exports.admit(plan.admitted)
        step = self._order(plan, result or StepResult())
        self._in_flight.append(step)
        step.waiting_tokens = self.tell_waiting()
        return step

    def tell_waiting(self) -> int:
        """Tokens of prompts that no step in flight computes, which other ranks are told."""
        if self._rounds is None:
            return 0
        tokens = self._scheduler.stages.waiting_tokens
        tokens -= sum(step.result.prefill_tokens for step in self._in_flight)
        self._rounds.waiting_tokens = max(tokens, 0)
        self._rounds.holds_prompts = self._scheduler.holds_prompts
        return self._rounds.waiting_tokens

    def _order(self, plan: Plan, result: StepResult) -> EngineStep:
        """What goes to the model; its sequences count on what it brings from now on."""
        tables: list[TableUpdate] = []
        columns, work = self._scheduler.stages.columns, plan.work
        added = [AddedRow.of(sequence) for sequence in plan.admitted]
        batch_rows, places, keys_from, others, exports, decode_rows, kv_tokens = columns.core.begin(
            work.batch_rows,
            starts=work.starts,
            counts=work.counts,
            drafts=work.drafts,
            chooses=work.chooses,
            decodes=work.decodes,
        )
        result.count(work, decode_rows, kv_tokens)
        result.admitted.extend(sequence.key for sequence in plan.admitted)
        blocks = [sequence.blocks[-1] for sequence in columns.sequences_of(batch_rows)]
        grown = GrownTables(batch_rows, places, np.array(blocks, dtype=np.int64), keys_from)
        for batch_row in others:
            sequence = columns.at(batch_row)
            place = sequence.blocks_in_table
            tables.append(
                TableUpdate(batch_row, place, sequence.blocks[place:], sequence.keys_from)
            )
            sequence.blocks_in_table = sequence.held
        chunks = [work[place] for place in exports]
        return EngineStep(work, added, tables, grown, chunks, self._forward.launch, result)

    def finish(self, step: EngineStep, now_s: float = 0.0) -> StepResult:
        """Take in the first of the steps in flight, once it was read.

        Never raises for what a request or the model did.
        """
        assert self._in_flight and step is self._in_flight[0], "steps end in their order"
        self._in_flight.popleft()
        self.finished += 1
        step.result.step = self.finished
        if step.computed is not None:
            self._take_in(step, step.computed)
        else:
            assert step.error is not None, "run it, and read it"
            self._fail(step, step.error)
        self._begin_leases(now_s)
        return step.result

    def _begin_leases(self, now_s: float) -> None:
        for sequence in self._outputs.pinned:
            assert sequence.export_lease_ms is not None
            sequence.lease_end_s = now_s + sequence.export_lease_ms / 1e3
            self._requests.time(sequence)
        self._outputs.pinned.clear()

    def _fail(self, step: EngineStep, error: Exception) -> None:
        """Out of memory, a bad kernel, here or on another rank: those in the batch fail by name, and may be served
        elsewhere; everybody else goes on.
        """
        if isinstance(error, StepAborted | RankLost):
            log.warning("a step of %d sequences ended: %s", len(step.work), error)
            text = f"the step ended, as in this worker's group {error}"
        else:
            log.error("a step of %d sequences failed", len(step.work), exc_info=error)
            text = f"the step failed: {type(error).__name__}: {error}"
        for item in step.work:
            if self._concerns(item):
                failure = RequestError(FailureKind.ENGINE, text)
                self._outputs.fail(item.sequence, failure, step.result)

    def _take_in(self, step: EngineStep, computed: Computed) -> None:
        """What became of the sequences that are still here; one that lost its batch row meanwhile keeps its tokens."""
        self._scheduler.lookahead.first = computed.first_drafts
        columns, chosen = self._scheduler.stages.columns, computed.chosen
        work = chosen.work
        there = self._take_tokens(computed)
        batch_rows = work.batch_rows if there is None else work.batch_rows[there]
        self._publishing.publish_rows(batch_rows)
        self._scheduler.stages.changed()  # what it named may be what somebody lacks
        self._kv_exports.commit(step.chunks)
        for item, entries in computed.prompt_logprobs:
            if self._concerns(item):
                self._outputs.scored(item.sequence, entries, step.result)
        for item, rows in computed.pooled:
            if self._concerns(item):
                self._outputs.pooled(item.sequence, rows, step.result)
        if computed.prompt_logprobs or computed.pooled:  # without those that these ended
            there, _ = columns.core.still_there(
                work.batch_rows, work.epochs, chosen.places, chosen.counts
            )
        self._outputs.tokens(chosen, there, step.result)

    def _take_tokens(self, computed: Computed) -> NDArray[np.bool_] | None:
        """The sequences have their tokens. Returns who still has the batch row of the step; `None`: all have."""
        columns, chosen = self._scheduler.stages.columns, computed.chosen
        work = chosen.work
        there, to_list = columns.core.still_there(
            work.batch_rows, work.epochs, chosen.places, chosen.counts
        )
        for batch_row in to_list:
            columns.at(batch_row).list_recent()
        columns.core.take_in(
            work.batch_rows,
            there=there,
            counts=work.counts,
            chooses=work.chooses,
            drafts=work.drafts,
            computed=computed.computed,
            drafted=computed.drafts,
            keys_from=computed.keys_from,
            keys_to=computed.keys_to,
            places=chosen.places,
            new_tokens=chosen.counts,
            ids=chosen.ids,
        )
        if there is not None:
            for row in places_of(~there[chosen.places]).tolist():
                it = chosen.row(row)
                if self._is_here(it.sequence):
                    it.sequence.add(it.ids)
        return there

    def _sits(self, item: Work) -> bool:
        columns = self._scheduler.stages.columns
        return (
            bool(columns.taken[item.batch_row]) and columns.epoch.item(item.batch_row) == item.epoch
        )

    def _concerns(self, item: Work) -> bool:
        """It has the batch row that it had, or lost that since and keeps what it was given."""
        return self._sits(item) or (item.chooses and self._is_here(item.sequence))

    def _is_here(self, sequence: Sequence) -> bool:
        return self._requests.get(sequence.key) is sequence

    def check(self) -> None:
        """Assert that what sequences count on is what comes."""
        pending = Counter[tuple[Sequence, str]]()
        every = [item for step in self._in_flight for item in step.work]
        for item in filter(self._sits, every):
            pending[item.sequence, "rows"] += item.count
            pending[item.sequence, "tokens"] += item.chooses
            pending[item.sequence, "drafts"] += item.drafts
        for it in self._requests.here.values():
            counted = (it.pending_rows, it.pending_tokens, it.pending_drafts)
            true = tuple(pending[it, what] for what in ("rows", "tokens", "drafts"))
            assert counted == true, "miscounted what the steps in flight bring"

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

from headrace.engine.cache.kv_export import Chunk, KvExports
from headrace.engine.cache.kv_import import KvImports
from headrace.engine.cache.publishing import Publishing
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.outputs import OutputBuilder
from headrace.engine.requests import Requests
from headrace.engine.result import StepResult
from headrace.engine.sampling.verify import ChosenRows
from headrace.engine.scheduler import Plan, Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.step.forward import Forward
from headrace.engine.step.input_batch import AddedRow, GrownTables, TableUpdate
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.rows import places_of
from headrace.engine.step.step import Computed, EngineStep, Order
from headrace.engine.step.work import StepWork, Work

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
    ) -> None:
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
            return None
        self._kv_exports.admit(plan.admitted)
        result = result or StepResult()
        result.count(plan.work)
        step = EngineStep(self._order(plan), self._forward.launch, result)
        columns, work = self._scheduler.stages.columns, plan.work
        columns.pending_rows[work.batch_rows] += work.counts
        columns.pending_tokens[work.batch_rows] += work.chooses
        columns.pending_drafts[work.batch_rows] += work.drafts
        self._in_flight.append(step)
        return step

    def _order(self, plan: Plan) -> Order:
        tables: list[TableUpdate] = []
        chunks: list[Chunk] = []
        columns, batch_rows = self._scheduler.stages.columns, plan.work.batch_rows
        more = columns.held[batch_rows] - columns.blocks_in_table[batch_rows]
        grown = self._grown(batch_rows[more == 1])
        for batch_row in batch_rows[more > 1].tolist():
            sequence = columns.at(batch_row)
            place = sequence.blocks_in_table
            tables.append(
                TableUpdate(batch_row, place, sequence.blocks[place:], sequence.keys_from)
            )
            sequence.blocks_in_table = sequence.held
        for place in places_of(columns.exports_kv[batch_rows]).tolist():
            item = plan.work[place]
            assert item.sequence.export is not None
            chunks.append(Chunk(item.sequence.export, item.start, item.count))
        placed = [AddedRow.of(sequence) for sequence in plan.admitted]
        return Order(plan.work, placed, tables, grown, chunks)

    def _grown(self, batch_rows: Ints) -> GrownTables:
        columns = self._scheduler.stages.columns
        blocks = [sequence.blocks[-1] for sequence in columns.sequences_of(batch_rows)]
        places = columns.blocks_in_table[batch_rows]
        columns.blocks_in_table[batch_rows] = columns.held[batch_rows]
        return GrownTables(
            batch_rows, places, np.array(blocks, dtype=np.int64), columns.keys_from[batch_rows]
        )

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
        """Out of memory, a bad kernel: those in the batch fail by name, everybody else goes on."""
        log.error("a step of %d sequences failed", len(step.order.work), exc_info=error)
        text = f"the step failed: {type(error).__name__}: {error}"
        for item in step.order.work:
            if self._concerns(item):
                failure = RequestError(FailureKind.ENGINE, text)
                self._outputs.fail(item.sequence, failure, step.result)

    def _take_in(self, step: EngineStep, computed: Computed) -> None:
        """What became of the sequences that are still here; one that lost its batch row meanwhile keeps its tokens."""
        self._scheduler.lookahead.first = computed.first_drafts
        columns, work, after = self._scheduler.stages.columns, computed.work, computed.after
        sit = self._sit(work)
        self._append(computed.chosen, sit)
        stays = work.where(sit)
        after = after.where(sit)
        batch_rows = stays.batch_rows
        columns.computed[batch_rows] = after.computed
        columns.drafts[batch_rows] = after.drafts
        columns.pending_rows[batch_rows] -= stays.counts
        columns.pending_tokens[batch_rows] -= stays.chooses
        columns.pending_drafts[batch_rows] -= stays.drafts
        columns.keys_from[batch_rows] = np.maximum(columns.keys_from[batch_rows], after.keys_from)
        columns.keys_to[batch_rows] = after.keys_to
        self._publishing.publish_rows(batch_rows)
        self._scheduler.stages.changed()  # what it named may be what somebody lacks
        self._kv_exports.commit(step.order.chunks)
        for item, entries in computed.prompt_logprobs:
            if self._concerns(item):
                self._outputs.scored(item.sequence, entries, step.result)
        if computed.prompt_logprobs:
            sit = self._sit(work)  # without those that the log-probabilities of their prompts ended
        self._outputs.tokens(computed.chosen, sit[computed.chosen.places], step.result)

    def _append(self, chosen: ChosenRows, sit: NDArray[np.bool_]) -> None:
        """The sequences have their tokens."""
        columns, counts = self._scheduler.stages.columns, chosen.counts
        sits = sit[chosen.places]
        batch_rows = chosen.work.batch_rows[chosen.places]
        if sits.all():
            columns.append(batch_rows, counts, chosen.ids)
            return
        columns.append(batch_rows[sits], counts[sits], chosen.ids[sits.repeat(counts)])
        for row in places_of(~sits).tolist():
            it = chosen.row(row)
            if self._is_here(it.sequence):
                it.sequence.add(it.ids)

    def _sit(self, work: StepWork) -> NDArray[np.bool_]:
        """Who still has the batch row of this step."""
        columns = self._scheduler.stages.columns
        return columns.taken[work.batch_rows] & (columns.epoch[work.batch_rows] == work.epochs)

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
        every = [item for step in self._in_flight for item in step.order.work]
        for item in filter(self._sits, every):
            pending[item.sequence, "rows"] += item.count
            pending[item.sequence, "tokens"] += item.chooses
            pending[item.sequence, "drafts"] += item.drafts
        for it in self._requests.here.values():
            counted = (it.pending_rows, it.pending_tokens, it.pending_drafts)
            true = tuple(pending[it, what] for what in ("rows", "tokens", "drafts"))
            assert counted == true, "miscounted what the steps in flight bring"

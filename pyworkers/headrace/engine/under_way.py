"""The steps under way: how a step is planned and ordered, and what becomes of its sequences once it ran.

At most two, which end in the order of their beginning. What the first one brings is not known when the second one is
planned: sequences say what is coming (`Sequence.coming_*`), and here that is added up and taken off again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from headrace.engine.answering import Answering
from headrace.engine.arrival import Arrivals
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.export import Chunk, Exports
from headrace.engine.forward import Forward
from headrace.engine.requests import Requests
from headrace.engine.result import StepResult
from headrace.engine.schedule import Plan, Scheduler
from headrace.engine.seats import Seated, Table
from headrace.engine.sequence import Sequence
from headrace.engine.step import Computed, Order, Step
from headrace.engine.work import Work

log = logging.getLogger(__name__)


class UnderWay:
    """Begins steps and finishes them. `publish` names the blocks that a sequence has whole."""

    def __init__(
        self,
        scheduler: Scheduler,
        forward: Forward,
        requests: Requests,
        answering: Answering,
        *,
        arrivals: Arrivals,
        exports: Exports,
        publish: Callable[[Sequence], None],
    ) -> None:
        self._scheduler = scheduler
        self._forward = forward
        self._requests = requests
        self._answering = answering
        self._arrivals = arrivals
        self._exports = exports
        self._publish = publish
        self._under_way: deque[Step] = deque()
        self.finished = 0  # steps so far

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def may_begin(self) -> bool:
        """`Engine.may_begin`."""
        return not self._under_way or (len(self._under_way) == 1 and not self._under_way[0].last)

    def begin(self, result: StepResult | None = None) -> Step | None:
        """`Engine.begin`."""
        assert self.may_begin, "finish what is under way"
        plan = self._scheduler.plan()
        if self._under_way:
            self._under_way[-1].reserved += plan.reserved
        else:
            self._arrivals.reserved(plan.reserved)
        if not plan.work:
            if self._under_way:
                # One that just lost its seat may have a token coming, and is not planned without it.
                self._under_way[-1].last = True
            return None
        self._exports.admit(plan.admitted)
        result = result or StepResult()
        result.count(plan.work)
        step = Step(self._order(plan), self._forward.launch, result)
        for item in plan.work:
            item.sequence.coming_rows += item.count
            item.sequence.coming_tokens += item.chooses
            item.sequence.coming_drafts += item.drafts
        self._under_way.append(step)
        return step

    def _order(self, plan: Plan) -> Order:
        tables: list[Table] = []
        chunks: list[Chunk] = []
        for item in plan.work:
            sequence = item.sequence
            if len(sequence.blocks) > sequence.tabled:
                new = sequence.blocks[sequence.tabled :]
                tables.append(Table(item.seat, sequence.tabled, new, sequence.keys_from))
                sequence.tabled = len(sequence.blocks)
            if sequence.export is not None:
                chunks.append(Chunk(sequence.export, item.start, item.count))
        seated = [Seated.of(sequence) for sequence in plan.admitted]
        return Order(plan.work, seated, tables, chunks)

    def finish(self, step: Step, now_s: float = 0.0) -> StepResult:
        """`Engine.finish`."""
        assert self._under_way and step is self._under_way[0], "steps end in their order"
        self._under_way.popleft()
        self.finished += 1
        step.result.step = self.finished
        self._arrivals.reserved(step.reserved)
        if step.computed is not None:
            self._take_in(step, step.computed)
        else:
            assert step.error is not None, "run it, and read it"
            self._fail(step, step.error)
        self._begin_leases(now_s)
        return step.result

    def _begin_leases(self, now_s: float) -> None:
        for sequence in self._answering.pinned:
            assert sequence.hand_off_ms is not None
            sequence.lease_end_s = now_s + sequence.hand_off_ms / 1e3
            self._requests.time(sequence)
        self._answering.pinned.clear()

    def _fail(self, step: Step, error: Exception) -> None:
        """Out of memory, a bad kernel: those in the batch fail by name, everybody else goes on."""
        log.error("a step of %d sequences failed", len(step.order.work), exc_info=error)
        text = f"the step failed: {type(error).__name__}: {error}"
        for item in step.order.work:
            if self._concerns(item):
                failure = RequestError(FailureKind.ENGINE, text)
                self._answering.fail(item.sequence, failure, step.result)

    def _take_in(self, step: Step, computed: Computed) -> None:
        """What became of the sequences that are still here; one that lost its seat meanwhile keeps its tokens."""
        self._scheduler.ahead.first = computed.first_drafts
        here = [chosen for chosen in computed.chosen if self._is_here(chosen.sequence)]
        for chosen in here:
            chosen.sequence.generated += chosen.ids
        places = zip(
            computed.work,
            computed.after.computed.tolist(),
            computed.after.drafts.tolist(),
            computed.after.keys_from.tolist(),
            computed.after.keys_to.tolist(),
            strict=True,
        )
        for item, tokens, drafts, keys_from, keys_to in places:
            if item.sits:
                sequence = item.sequence
                sequence.computed, sequence.drafts = tokens, drafts
                sequence.coming_rows -= item.count
                sequence.coming_tokens -= item.chooses
                sequence.coming_drafts -= item.drafts
                sequence.keys_from = max(sequence.keys_from, keys_from)
                sequence.keys_to = keys_to
                self._publish(sequence)
        self._exports.commit(step.order.chunks)
        for item, entries in computed.prompt_logprobs:
            if self._concerns(item):
                self._answering.scored(item.sequence, entries, step.result)
        for chosen in here:
            if self._is_here(chosen.sequence):  # the log-probabilities of its prompt were numbers
                self._answering.tokens(chosen, step.result)

    def _concerns(self, item: Work) -> bool:
        """It has the seat that it had, or lost that since and keeps what it was given."""
        return item.sits or (item.chooses and self._is_here(item.sequence))

    def _is_here(self, sequence: Sequence) -> bool:
        return self._requests.get(sequence.key) is sequence

    def check(self) -> None:
        """Assert that what sequences count on is what comes."""
        coming = Counter[tuple[Sequence, str]]()
        for item in [item for step in self._under_way for item in step.order.work if item.sits]:
            coming[item.sequence, "rows"] += item.count
            coming[item.sequence, "tokens"] += item.chooses
            coming[item.sequence, "drafts"] += item.drafts
        for it in self._requests.here.values():
            counted = (it.coming_rows, it.coming_tokens, it.coming_drafts)
            true = tuple(coming[it, what] for what in ("rows", "tokens", "drafts"))
            assert counted == true, "miscounted what the steps under way bring"

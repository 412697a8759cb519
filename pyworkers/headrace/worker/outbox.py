"""What one router is owed, put together until its link takes more.

A fast link takes the answers of each step as they come. For a slow one they add up here, request by request: nothing is
lost, and nothing grows beyond what the running requests may generate. Ends of requests that do not run, such as those
refused, are bounded by not hearing a router whose outbox is `crowded`.
"""

from __future__ import annotations

import logging
from collections import deque

from headrace.engine.cache.block_log import BlockLog
from headrace.engine.result import Answers, StepResult
from headrace.wire.frames import (
    Bye,
    Failed,
    Freed,
    FromWorker,
    GrammarTotals,
    GroupTotals,
    KvReady,
    Load,
    Offer,
    OtherPrompts,
    Step,
    Transferred,
)
from headrace.wire.output_columns import Outputs, joined

log = logging.getLogger(__name__)

MOST_REPORTS = 1024  # of ended pulls, for a router that takes nothing. A guess
# Refusals and ends that a router has not taken yet. One that asks on and takes nothing is not heard until it does.
MOST_ENDS = 16_384
MOST_STEPS = 8  # whose outputs a slow link's outbox keeps before they are joined. A guess
MASKS_UNTOLD = 4096  # a worker with answers to tell tells of so many masks at once. A guess
FRAME_VALUES = 1 << 20  # ids and log-probabilities in one Step; keeps a frame below its limit


class Outbox:
    """Pure: the worker adds, the sender takes."""

    def __init__(self) -> None:
        self.log: BlockLog | None = (
            None  # from the moment that the worker knows the link's hash key
        )
        self.bye: Bye | None = None  # to be sent once
        self.said_bye = False
        self._last = StepResult()
        self._load = Load()
        self._waiting_tokens = 0
        self._outputs: list[Outputs] = []  # of successive steps, none empty
        self._failed: dict[int, Failed] = {}
        self._freed: dict[int, Freed] = {}
        self._ready: dict[int, KvReady] = {}
        self._reports: deque[Transferred] = deque()
        self._offer: Offer | None = None
        self._totals = self._told = GroupTotals()
        self._grammars = self._told_grammars = GrammarTotals()
        self._others = self._told_others = OtherPrompts()

    def stepped(self, result: StepResult) -> None:
        """`result` is the last step now, if it computed anything; its answers for this link go to `answer`."""
        if result.step != self._last.step:
            self._last = result

    def loaded(self, load: Load, waiting_tokens: int) -> None:
        """As it is now, which may be later than the last step."""
        self._load = load
        self._waiting_tokens = waiting_tokens

    def totalled(self, totals: GroupTotals) -> None:
        """What this rank did for its group so far."""
        self._totals = totals

    def spent(self, totals: GrammarTotals) -> None:
        """What this worker spent on grammars so far."""
        self._grammars = totals

    def others(self, prompts: OtherPrompts) -> None:
        """What this worker has of other routers now."""
        self._others = prompts

    def answer(self, answers: Answers) -> None:
        if answers.said:
            self._outputs.append(Outputs.of(answers.said))
        if answers.columns is not None:
            self._outputs.append(answers.columns)
        if len(self._outputs) > MOST_STEPS:
            self._outputs = [joined(self._outputs)]
        self._failed |= {failed.request: failed for failed in answers.failed}
        self._freed |= {freed.request: freed for freed in answers.freed}

    def failed(self, failed: Failed) -> None:
        """A request was refused; it held no blocks."""
        self._failed[failed.request] = failed

    def cancelled(self, request: int, blocks: int | None) -> None:
        """The router gave `request` up: nothing but its blocks is of interest any more. None: they are not free yet."""
        self._outputs = [part for it in self._outputs if len(part := it.without(request))]
        self._failed.pop(request, None)
        self._freed.pop(request, None)
        self._ready.pop(request, None)
        if blocks is not None:
            self._freed[request] = Freed(request, blocks)

    def tell(self, frame: KvReady | Transferred | Offer | Freed) -> None:
        """News of KV on its way. Bounded: a ticket for each running request, the last offer, so many reports."""
        match frame:
            case KvReady():
                self._ready[frame.request] = frame
            case Offer():
                self._offer = frame
            case Freed():
                self._ready.pop(frame.request, None)
                self._freed[frame.request] = frame
            case Transferred():
                self._reports.append(frame)
                if len(self._reports) > MOST_REPORTS:
                    dropped = self._reports.popleft()
                    log.warning("handoff report_dropped: of request %d", dropped.request)

    @property
    def crowded(self) -> bool:
        """The router takes less than it asks for."""
        return len(self._failed) + len(self._freed) >= MOST_ENDS

    def take(self) -> list[FromWorker]:
        """All frames that are due: cache events, tickets, prompts of others, one Step (a heartbeat, when nothing else),
        what the rank did for its group, ends of pulls and of requests.
        """
        frames: list[FromWorker] = [] if self.log is None else [*self.log.take()]
        frames += self._ready.values()
        if self._others != self._told_others:
            frames.append(self._others)
            self._told_others = self._others
        outputs = joined(self._outputs) if self._outputs else Outputs.of([])
        frames += [self._step(part) for part in outputs.parts(FRAME_VALUES)]
        new, told = self._grammars, self._told_grammars
        if new != told and (not len(outputs) or new.masks - told.masks >= MASKS_UNTOLD):
            frames.append(new)
            self._told_grammars = new
        if self._totals != self._told:
            frames.append(self._totals)
            self._told = self._totals
        frames += self._reports
        frames += self._failed.values()
        frames += self._freed.values()
        if self._offer is not None:
            frames.append(self._offer)
            self._offer = None
        if self.bye is not None:
            frames.append(self.bye)
            self.bye, self.said_bye = None, True
        self._ready.clear()
        self._outputs.clear()
        self._reports.clear()
        self._failed.clear()
        self._freed.clear()
        return frames

    def _step(self, outputs: Outputs) -> Step:
        last = self._last
        return Step(
            step=last.step,
            ms=last.ms,
            waited_us=last.waited_us,
            prefill_tokens=last.prefill_tokens,
            prefill_context=last.prefill_context,
            decode_rows=last.decode_rows,
            kv_tokens=last.kv_tokens,
            waiting_tokens=self._waiting_tokens,
            drafted=last.drafted,
            accepted=last.accepted,
            load=self._load,
            outputs=outputs,
        )

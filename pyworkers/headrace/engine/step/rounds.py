"""The rounds of one rank of a group: what it tells the others, and the passes that it runs for them.

A round is an agreement, the drafting passes of sequences that came with their KV, the forward pass, and with a drafting
layer the passes that follow it. All ranks run as many of each, with rows or without. A rank that fails between the
agreement and its last pass ends the round on all ranks. A failure after its last pass concerns its own requests alone:
no other rank waits for it, and its next load tells what became of its rows. So does a failure before the agreement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.prompt_balance import PromptBalance
from headrace.engine.step.lockstep import BetweenSteps, Lockstep, RankLoad
from headrace.engine.step.step import failure_of
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.moe.transport import RankLost, StepAborted
from headrace_kernels.torch_if_loaded import inference_mode

if TYPE_CHECKING:
    from headrace.models import Model
    from headrace_kernels.ops import Results

log = logging.getLogger(__name__)


class Rounds:
    """One rank's rounds, on the thread of the steps.

    Attributes are for the thread of the engine: it sets `waiting_tokens`, `drain_ms`, `at_rest` and `wanted`, which a
    round only reads, and reads the others.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        model: Model,
        *,
        drafts: bool,
        balance: PromptBalance | None = None,
    ) -> None:
        """With `drafts` drafting passes follow each forward pass. All ranks say the same.

        `balance` hears of every agreement.
        """
        self._balance = balance
        self._lockstep = lockstep
        self._model = model
        self._drafts = drafts
        self._inside = False  # others wait for passes of this rank
        self._passes = 0  # of the drafting layer that are left
        self._last = False  # no other pass follows these
        self._told = (None, False)
        self._agreed_s = time.perf_counter()
        self._news: Callable[[], None] | None = None
        self.loads = [RankLoad()] * lockstep.ranks  # of the last agreement
        self.number = 0  # rounds so far
        self.lost: RankLost | None = None  # then the group is over
        self.waiting_tokens = 0
        self.drain_ms: int | None = None
        self.at_rest = False
        self.wanted = False  # this rank has work: `join` returns
        self.holds_prompts = False  # `join` returns after each round: they may begin then
        # In which prompts of this rank waited for those of others, and how long that took.
        self.held_rounds = 0
        self.held_ms = 0.0
        self.between: BetweenSteps | None = None  # set before the first round

    @property
    def waited_s(self) -> float:
        return self._lockstep.waited_s

    @property
    def over(self) -> bool:
        """No round follows: all ranks are at rest, or one is lost."""
        return self.lost is not None or all(load.at_rest for load in self.loads)

    @property
    def due(self) -> bool:
        """This rank has to take part in a round even if it has no work."""
        news = (self.drain_ms, self.at_rest) != self._told
        return not self.over and (news or not self._lockstep.asleep)

    @property
    def drain_ms_of_others(self) -> int | None:
        """What the rank that leaves soonest gives its requests; `None` while all others stay."""
        others = (load.drain_ms for rank, load in enumerate(self.loads) if rank != self.rank)
        return min((ms for ms in others if ms is not None), default=None)

    @property
    def rank(self) -> int:
        return self._lockstep.rank

    def on_news(self, call: Callable[[], None] | None) -> None:
        """Have `call` called, on any thread, when others begin a round while the group sleeps, or begin to leave."""
        self._news = call
        self._lockstep.on_wake(call)

    def begin(self, load: RankLoad) -> bool:
        """Agree on a round. False where no rank has work: then it is over already."""
        load = replace(
            load,
            drain_ms=self.drain_ms,
            at_rest=self.at_rest,
            between=self.between is not None and self.between.due(self.number + 1),
        )
        before = self.drain_ms_of_others
        loads = self._lockstep.agree(load)
        self._told = load.drain_ms, load.at_rest
        self.loads = loads
        self.number += 1
        self._note_held()
        if self._balance is not None:
            self._balance.agreed(loads)
        self._inside = any(it.rows or it.drafts_first for it in loads)
        if self._news is not None and (self.over or self.drain_ms_of_others != before):
            self._news()
        if self._inside and any(it.between for it in loads):
            assert self.between is not None, "all ranks have it, or none"
            self.between.run()
        return self._inside

    def _note_held(self) -> None:
        now_s = time.perf_counter()
        if self.holds_prompts:
            self.held_rounds += 1
            self.held_ms += (now_s - self._agreed_s) * 1e3
        self._agreed_s = now_s

    @property
    def drafts_first(self) -> bool:
        """Some rank drafts before the forward pass of this round."""
        return any(load.drafts_first for load in self.loads)

    @contextmanager
    def guard(self) -> Generator[None]:
        """What fails here while others wait for this rank ends the round for them."""
        try:
            yield
        except RankLost as lost:
            self.lost, self._inside = lost, False
            raise
        except StepAborted:
            self._inside = False
            raise
        except BaseException as error:
            inside, self._inside = self._inside, False
            if inside:
                self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        try:
            self._lockstep.abort(error)
        except RankLost as lost:
            self.lost = lost

    def passed(self) -> None:
        """This rank's last pass of the round is done."""
        self._inside = False

    def agree_passes(self, most: int, *, last: bool) -> None:
        """Drafting passes begin, here `most` at the utmost; the `last` ones are those after the forward pass."""
        self._passes = self._lockstep.agree_depth(most)
        assert self._passes >= most, "the most of any rank"
        self._last = last
        self._count()

    def draft(self, batch: DraftBatch) -> Results:
        """One of them."""
        self._passes -= 1
        assert self._passes >= 0, "a pass that no other rank knows of"
        logits = self._model.draft(batch)
        self._count()
        return logits

    def _count(self) -> None:
        if self._last and self._passes == 0:
            self.passed()

    def run_rest(self) -> None:
        """The passes that other ranks may have, and this one does not."""
        while self._passes > 0:
            self.draft(NO_DRAFTS)

    def pass_without_rows(self) -> None:
        """All passes of a round for a rank that has nothing to compute."""
        if self.drafts_first:
            self.agree_passes(0, last=False)
            self.run_rest()
        self._model.forward(NO_ROWS)
        if self._drafts:
            self.agree_passes(0, last=True)
            self.run_rest()
        else:
            self.passed()

    def join(self) -> None:
        """Take part in rounds until the group sleeps or is over, or this rank is `wanted` for its own work."""
        while not self.wanted and not self.over and self.join_one() and not self.holds_prompts:
            pass

    def join_one(self) -> bool:
        """Take part in one round. False where no rank has work. Never raises for what a model or another rank did."""
        try:
            with inference_mode(), self.guard():
                if not self.begin(RankLoad(waiting_tokens=self.waiting_tokens)):
                    return False
                self.pass_without_rows()
        except RankLost:
            return False
        except StepAborted as aborted:
            log.warning("a round without rows here was ended: %s", aborted)
        except BaseException as error:  # a panic of the Rust code, too
            log.error("a round without rows here failed", exc_info=failure_of(error))  # noqa: TRY400
        return True


def _ints(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.zeros(shape, dtype=np.int32)


NO_ROWS = Batch(
    tokens=_ints(0),
    positions=_ints(0),
    slots=np.zeros(0, dtype=np.int64),
    seq_starts=_ints(1),
    context_lens=_ints(0),
    block_tables=_ints(0, 0),
    logit_rows=_ints(0),
    prompt_lens=_ints(0),
)
NO_DRAFTS = DraftBatch(
    tokens=_ints(0),
    positions=_ints(0),
    slots=np.zeros(0, dtype=np.int64),
    seq_starts=_ints(1),
    context_lens=_ints(0),
    block_tables=_ints(0, 0),
    logit_rows=_ints(0),
    hidden_from=_ints(0),
    first_keys=_ints(0),
    chained=False,
)

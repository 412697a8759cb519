"""Continuous batching over one model: requests in, tokens out, one `step` at a time.

Synchronous and without locks: one thread at a time. A step is plan -> batch -> forward -> sample -> commit. Whatever a
request or a model does wrong ends as a named failure of the requests concerned; the engine goes on.

A request whose prompt is computed here and answered elsewhere (`hand_off`) is an export; one whose KV comes from
elsewhere (`kv_from`) is arriving. Only `take_exports` may be called while a step runs.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.arrival import Arrivals, Pull
from headrace.engine.block_pool import BlockEvent, BlockPool
from headrace.engine.config import EngineConfig
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.export import Export, Exports
from headrace.engine.forward import Forward
from headrace.engine.hand_over import Adoption, HandOver
from headrace.engine.hot import HotBlock
from headrace.engine.intake import Intake
from headrace.engine.names import BlockNamer
from headrace.engine.result import StepResult
from headrace.engine.schedule import Plan, Scheduler
from headrace.engine.sequence import Key, Sequence, Stage
from headrace.frames import Finish, Freed, Load, Output, Submit, TokenLogprob

if TYPE_CHECKING:
    from headrace.models import Model

log = logging.getLogger(__name__)


class Engine:
    """One model, its KV blocks, and the requests on them."""

    def __init__(self, model: Model, config: EngineConfig, namer: BlockNamer) -> None:
        self.model = model
        self.config = config
        model_tokens = min(model.context_tokens, config.context_tokens or model.context_tokens)
        # The longest sequence, prompt and answer: one that fills the whole pool can still run alone.
        self.context_tokens = min(model_tokens, config.num_blocks * config.block_tokens)
        self.pool = BlockPool(config.num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=config.block_tokens,
            max_sequences=config.max_sequences,
            max_batched_tokens=config.max_batched_tokens,
            max_waiting=config.max_waiting,
            prefix_cache=config.prefix_cache,
        )
        self._namer = namer
        self._exports = Exports(config.block_tokens)
        self.alarm = self._exports.alarm  # rings when an export has begun or moved on
        self._forward = Forward(
            model,
            self._exports,
            max_sequences=config.max_sequences,
            max_blocks=-(-self.context_tokens // config.block_tokens),
        )
        self._intake = Intake(
            vocab_size=model.vocab_size,
            model_tokens=model_tokens,
            context_tokens=self.context_tokens,
        )
        self._arrivals = Arrivals(self.scheduler, self._publish)
        self._hand_over = HandOver(self.pool)
        self._sequences: dict[Key, Sequence] = {}
        self._leaving: dict[Key, Sequence] = {}  # they ended, and a mover may still write
        self._timed: dict[Sequence, None] = {}  # those with any time limit
        self._pinned: list[Sequence] = []  # exports whose lease begins with the end of this step
        self._steps = 0

    @property
    def idle(self) -> bool:
        """A step would compute nothing, and nothing is due before `next_deadline_s`, until something new comes."""
        return self.scheduler.idle

    @property
    def empty(self) -> bool:
        """No request is here, not even one that ended and whose blocks are still written to."""
        return not self._sequences and not self._leaving

    @property
    def load(self) -> Load:
        return Load(
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            running=len(self.scheduler.running),
            waiting=sum(sequence.arriving is None for sequence in self.scheduler.waiting),
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before all requests decode: of those that wait, and of those whose prompt is under way.

        What the prefix cache gives is known, and left out, from a request's start on. A prompt whose KV comes from
        elsewhere is none of it.
        """
        waiting = self.scheduler.waiting
        tokens = sum(sequence.total for sequence in waiting if sequence.arriving is None)
        for sequence in self.scheduler.running:
            remaining = sequence.remaining
            if remaining > 1 or not sequence.generated:  # it does not decode
                tokens += remaining
        return tokens

    @property
    def steps(self) -> int:
        """Steps so far that computed something."""
        return self._steps

    @property
    def next_deadline_s(self) -> float | None:
        """When `step` or `expire` has to be called even if the engine is idle."""
        return min((_due_s(sequence) for sequence in self._timed), default=None)

    def submit(self, submit: Submit, *, link: int = 0, now_s: float = 0.0) -> None:
        """Take a request. Raises `RequestError`; then the engine is as before.

        With `kv_from` it holds nothing until its `ticket`, or until `go_on` says that nothing comes.
        """
        key = Key(link, submit.request)
        if key in self._sequences or key in self._leaving:
            raise RequestError(
                FailureKind.DUPLICATE_REQUEST, f"request {submit.request} is here already"
            )
        sequence = self._intake.sequence(key, submit, now_s)
        sequence.names = self._names(sequence.salt, sequence.tokens(0, sequence.total))
        self.scheduler.check_queue(self._arrivals.outside)
        if sequence.arriving is not None:
            self._arrivals.expect(sequence)
        else:
            self.scheduler.wait(sequence)
        self._sequences[key] = sequence
        self._time(sequence)

    def _names(
        self, salt: bytes, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> list[bytes]:
        if not self.config.prefix_cache:
            return []
        return self._namer.follow(None, tokens, salt)

    def _time(self, sequence: Sequence) -> None:
        """Its time limits changed."""
        if _due_s(sequence) < math.inf:
            self._timed[sequence] = None
        else:
            self._timed.pop(sequence, None)

    def cancel(self, key: Key) -> int | None:
        """Stop a request at any stage; returns how many blocks it gave back, 0 if it is unknown.

        `None` where a mover may still write to its blocks: stop it, then call `pulled` or `pull_failed`, which
        returns how many blocks it gave back.
        """
        if key in self._leaving:
            return None
        sequence = self._sequences.get(key)
        return 0 if sequence is None else self._end(sequence)

    def cancel_link(self, link: int) -> int:
        """Cancel all requests of a link; returns how many there were. Pulls under way end as with `cancel`."""
        keys = [key for key in self._sequences if key.link == link]
        for key in keys:
            self.cancel(key)
        return len(keys)

    # --- KV that comes from another worker ---

    def ticket(self, key: Key) -> None:
        """The router has the ticket for an arriving request: reserve blocks, when there is room. Others: no effect."""
        if sequence := self._sequences.get(key):
            self._arrivals.ticket(sequence)

    def take_pulls(self) -> list[Pull]:
        """Arriving requests that a `step` gave their blocks since the last call.

        Each of them ends in `pulled` or `pull_failed`.
        """
        return self._arrivals.take_pulls()

    def pulled(self, key: Key) -> int | None:
        """The mover has stopped, all is there, and the source said that it was good.

        For a request that ended meanwhile: how many blocks it gave back just now (`Freed` is due). Otherwise `None`.
        """
        if key in self._leaving:
            return self.scheduler.remove(self._leaving.pop(key))
        if sequence := self._sequences.get(key):
            self._arrivals.pulled(sequence)
            self._time(sequence)
        return None

    def pull_failed(self, key: Key) -> int | None:
        """The mover has stopped, or never began, and nothing counts. Returns the same as `pulled`."""
        if key in self._leaving:
            return self.scheduler.remove(self._leaving.pop(key))
        if sequence := self._sequences.get(key):
            self._arrivals.failed(sequence)
            self._time(sequence)
        return None

    def go_on(self, key: Key, generated: list[int], now_s: float = 0.0) -> None:
        """The first tokens of an arriving request. None: nothing comes, compute it all.

        In that case stop a mover that runs, then call `pulled` or `pull_failed`. A pull that has not begun
        `timeout_ms` later is given up; one that runs is the caller's to stop. Raises `RequestError` for tokens that
        cannot be; then nothing changed. Unknown requests and further calls: no effect.
        """
        if sequence := self._sequences.get(key):
            if sequence.arriving is not None and not sequence.arriving.going:
                self._intake.check_first(sequence, generated)
            self._arrivals.go_on(sequence, generated, now_s)
            self._time(sequence)

    # --- KV that goes to another worker ---

    def take_exports(self) -> list[Export]:
        """Exports admitted since the last call, in order. For any thread, also during a step.

        `alarm.call` tells of them, and of each part that became whole, on the thread of the step.
        """
        return self._exports.take()

    def released(self, key: Key) -> int | None:
        """The puller has all of an export. Returns how many blocks it gave back (`Freed` is due).

        `None` where it is over already, or where its first token is still to come: then the step says `Freed`.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.export is None:
            return None
        if sequence.stage is Stage.PARKED:
            return self._end(sequence)
        sequence.export.released = True
        return None

    # --- cached blocks that move without a request ---

    def hottest(self, count: int) -> list[HotBlock]:
        """The most used blocks of the prefix cache, at most `count`, parents before children."""
        return self.pool.hottest(count)

    def pin(self, names: list[bytes]) -> list[int]:
        """Keep these blocks, which `hottest` just gave, where they are until `unpin`. Raises `KeyError`."""
        return self._hand_over.pin(names)

    def unpin(self, blocks: list[int]) -> None:
        """What `pin` gave is read no more."""
        self._hand_over.release(blocks)
        self.scheduler.changed()

    def adopt(self, names: list[bytes], parents: list[int]) -> Adoption:
        """Reserve blocks for `names` as far as running requests leave room: pull its `wanted`, then call `adopted`.

        `parents` are places in `names`, -1 at the root. Raises `ValueError` where a parent is not before its child.
        """
        return self._hand_over.adopt(names, parents, keep_free=self.scheduler.spoken_for)

    def adopted(self, adoption: Adoption, *, arrived: bool) -> None:
        """The mover has stopped. With `arrived` all of `wanted` is there and goes into the prefix cache."""
        self._hand_over.end(adoption, arrived=arrived)
        self.scheduler.changed()

    def use_namer(self, namer: BlockNamer) -> None:
        """Name blocks otherwise from now on. Nothing cached so far is found again."""
        self._namer = namer
        self.pool.clear_names()
        self._hand_over.renamed()
        for sequence in self._sequences.values():
            names = self._names(sequence.salt, sequence.tokens(0, sequence.total))
            self.scheduler.rename(sequence, names)
        for sequence in self._leaving.values():
            self.scheduler.rename(sequence, [])
        for sequence in self._sequences.values():
            self._publish(sequence)

    def abandon(self, kind: FailureKind, message: str) -> StepResult:
        """Fail all requests: they may go on elsewhere. Exports with their first token out are only freed."""
        result = StepResult(step=self._steps)
        for sequence in list(self._sequences.values()):
            if sequence.lease_end_s is not None:
                self._free(sequence, result)
            else:
                self._fail(sequence, RequestError(kind, message), result)
        return result

    def take_events(self) -> list[BlockEvent]:
        """Which blocks came into the cache and left it since the last call."""
        return self.pool.take_events()

    def step(self, now_s: float = 0.0) -> StepResult:
        """Compute one step. Never raises for what a request or the model did."""
        began_s = time.monotonic()
        result = self.expire(now_s)
        plan = self.scheduler.plan()
        self._arrivals.reserved(plan.reserved)
        if plan.work:
            self._steps += 1
            result.count(plan.work)
            self._compute(plan, result)
            self._begin_leases(now_s + time.monotonic() - began_s)
        result.step = self._steps
        return result

    def expire(self, now_s: float) -> StepResult:
        """End what is due by now. Part of every step; for an idle engine it is enough."""
        result = StepResult(step=self._steps)
        for sequence in [s for s in self._timed if _due_s(s) <= now_s]:
            if sequence.lease_end_s is not None:
                self._free(
                    sequence, result
                )  # its first token is out: the other leg has the last word
            elif sequence.deadline_s is not None and sequence.deadline_s <= now_s:
                sequence.prompt_logprobs = None  # perhaps not complete
                self._answer(sequence, [], None, "cancelled", result)
            else:
                self._arrivals.compute(sequence)
                self._time(sequence)
        return result

    def _begin_leases(self, now_s: float) -> None:
        for sequence in self._pinned:
            assert sequence.hand_off_ms is not None
            sequence.lease_end_s = now_s + sequence.hand_off_ms / 1e3
            self._time(sequence)
        self._pinned.clear()

    def _compute(self, plan: Plan, result: StepResult) -> None:
        try:
            computed = self._forward.compute(plan)
        except Exception as error:
            # Out of memory, a bad kernel: those in the batch fail by name, everybody else goes on.
            log.exception("a step of %d sequences failed", len(plan.work))
            text = f"the step failed: {type(error).__name__}: {error}"
            for item in plan.work:
                self._fail(item.sequence, RequestError(FailureKind.ENGINE, text), result)
            return
        for item in plan.work:
            item.sequence.computed += item.count
            self._publish(item.sequence)
        self._exports.commit(plan.work)
        for sequence, entries in computed.prompt_logprobs:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs += entries
            if sequence.limit == sequence.prompt_len == sequence.computed:
                if any(math.isnan(entry.logprob) for entry in sequence.prompt_logprobs):
                    self._fail(sequence, _not_finite(), result)
                else:
                    self._answer(sequence, [], None, "length", result)
        for sequence, token, logprob in computed.tokens:
            if token is None:
                self._fail(sequence, _not_finite(), result)
            else:
                self._accept(sequence, token, logprob, result)

    def _publish(self, sequence: Sequence) -> None:
        block_tokens = self.config.block_tokens
        full = sequence.computed // block_tokens
        if full == sequence.published or not self.config.prefix_cache:
            return
        if full > len(sequence.names):
            named = len(sequence.names)
            parent = sequence.names[-1] if named else None
            tokens = sequence.tokens(named * block_tokens, full * block_tokens)
            names = self._namer.follow(parent, tokens, sequence.salt)
            self.scheduler.append_names(sequence, names)
        if self.scheduler.publish(sequence) and sequence.seat is not None:
            self._forward.blocks_changed(sequence)

    def _accept(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, result: StepResult
    ) -> None:
        sequence.generated.append(token)
        if sequence.penalties is not None:
            sequence.penalties.add(token)
        finish: Finish | None = None
        if token in sequence.stop_ids:
            finish = "stop"
        elif sequence.total >= sequence.limit:
            finish = "length"
        self._answer(sequence, [token], logprob, finish, result)
        if sequence.export is not None and finish is None:
            self._pin(sequence, result)

    def _pin(self, sequence: Sequence, result: StepResult) -> None:
        """The rest of the answer is another worker's: keep the blocks for it."""
        assert sequence.export is not None
        if sequence.export.released:
            self._free(sequence, result)
        else:
            self.scheduler.park(sequence)
            self._pinned.append(sequence)

    def _answer(
        self,
        sequence: Sequence,
        ids: list[int],
        logprob: TokenLogprob | None,
        finish: Finish | None,
        result: StepResult,
    ) -> None:
        first = not sequence.answered
        prompt_logprobs = sequence.prompt_logprobs
        output = Output(
            request=sequence.key.request,
            ids=ids,
            logprobs=None if logprob is None else [logprob],
            finish=finish,
            cached_tokens=sequence.cached_tokens if first else None,
            prompt_logprobs=prompt_logprobs if first else None,
        )
        sequence.answered = True
        sequence.prompt_logprobs = None  # sent, and not wanted again after a preemption
        result.of(sequence.key.link).outputs.append(output)
        if finish is not None:
            if finish != "cancelled" and sequence.export is None:
                self.scheduler.note_answer(len(sequence.generated))
            self._free(sequence, result)

    def _fail(self, sequence: Sequence, error: RequestError, result: StepResult) -> None:
        result.of(sequence.key.link).failed.append(error.frame(sequence.key.request))
        self._free(sequence, result)

    def _free(self, sequence: Sequence, result: StepResult) -> None:
        blocks = self._end(sequence)
        if blocks is not None:  # otherwise `pulled` or `pull_failed` says it
            freed = Freed(request=sequence.key.request, blocks=blocks)
            result.of(sequence.key.link).freed.append(freed)

    def _end(self, sequence: Sequence) -> int | None:
        """Its blocks are free, except (`None`) where a mover may still write to them."""
        del self._sequences[sequence.key]
        self._timed.pop(sequence, None)
        if sequence.export is not None:
            sequence.export.revoked = True  # before a block of it can be another's
        if sequence.arriving is not None:
            self._arrivals.forget(sequence)
            if sequence.arriving.written:
                self._leaving[sequence.key] = sequence
                return None
        return self.scheduler.remove(sequence)

    def check(self) -> None:
        """Assert the invariants of pool and scheduler. Costs O(blocks): for tests and shutdown."""
        scheduler = self.scheduler
        scheduler.check(self._hand_over.held.elements())
        known = {*scheduler.running, *scheduler.waiting, *scheduler.ready, *scheduler.parked}
        here = {*self._sequences.values(), *self._leaving.values()}
        assert known <= here, "a request is not known any more"
        assert len(here - known) == self._arrivals.outside, "a request is lost"
        assert all(s.stage is Stage.OUTSIDE for s in here - known), "a request is lost"
        assert all(sequence in here for sequence in self._timed), "one that ended has a deadline"

    def check_idle(self) -> None:
        """Assert in O(1) that an engine without requests holds no block, but for pinned and adopted ones."""
        if self.empty:
            used = self.pool.used - len(self._hand_over.held)
            assert used == 0, f"{used} blocks leaked"


def _due_s(sequence: Sequence) -> float:
    """When something has to happen to it by itself; infinity if never."""
    due_s = math.inf if sequence.deadline_s is None else sequence.deadline_s
    if sequence.lease_end_s is not None:
        due_s = min(due_s, sequence.lease_end_s)
    arriving = sequence.arriving
    if arriving is not None and arriving.pull_by_s is not None and not arriving.written:
        due_s = min(due_s, arriving.pull_by_s)
    return due_s


def _not_finite() -> RequestError:
    return RequestError(FailureKind.ENGINE, "the model's logits are not finite")

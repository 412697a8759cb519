"""Continuous batching over one model: requests in, tokens out, step by step.

A step is planned and ordered (`steps.begin`); it runs (batch -> forward -> sample -> draft) and is read, on whatever
thread; `steps.finish` takes in what it gave. `step` does it all. A second step may begin while one is in flight: then
the model never waits for the engine. Everything else may be called at any time between, and by one thread: there are no
locks. Whatever a request or a model does wrong ends as a named failure of the requests concerned; the engine goes on.

The parts of an engine are for its callers, too: `stages` says where each request is, `pool` what changed in the cache,
`kv_imports` and `kv_exports` what is to be pulled from where; `pinned` has blocks that no request holds, and `steps`
are those in flight.

Blocks that are freed while a step writes to them may be another sequence's at once, as steps run one after the other.
Only movers, which write from elsewhere, get no block before the steps in flight are done with it.

A request whose prompt is computed here and answered elsewhere (`kv_transfer`) is an export; one whose KV comes from
elsewhere (`kv_from`) is an import.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.engine.admission import Admission
from headrace.engine.cache.block_hash import BlockHasher
from headrace.engine.cache.block_pool import BlockPool
from headrace.engine.cache.kv_export import KvExports
from headrace.engine.cache.kv_import import KvImports
from headrace.engine.cache.migration import PinnedBlocks
from headrace.engine.cache.publishing import Publishing
from headrace.engine.config import EngineConfig
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.intake import Intake
from headrace.engine.outputs import OutputBuilder
from headrace.engine.prompt_balance import PromptBalance
from headrace.engine.requests import Requests
from headrace.engine.result import StepResult
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Key, Stage
from headrace.engine.speculative.lookahead import Lookahead
from headrace.engine.stages import Stages
from headrace.engine.step.forward import Forward
from headrace.engine.step.in_flight import StepsInFlight
from headrace.engine.step.lockstep import Lockstep
from headrace.engine.step.rounds import Rounds
from headrace.engine.step.row_counts import RowCounts
from headrace.wire.frames import GrammarTotals, Load, Submit

if TYPE_CHECKING:
    from headrace._core import GrammarVocabulary
    from headrace.models import Model


class Engine:
    """One model, its KV blocks, and the requests on them.

    `clock` counts seconds, to measure what steps cost. With `vocabulary` answers can be held to grammars. With
    `lockstep` the engine is one rank of a group: it steps in `rounds` with the engines of the other ranks.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        hasher: BlockHasher,
        *,
        clock: Callable[[], float] = time.perf_counter,
        lockstep: Lockstep | None = None,
        vocabulary: GrammarVocabulary | None = None,
    ) -> None:
        """Raises `ValueError` for a config that the model cannot serve."""
        if vocabulary is not None and vocabulary.tokens != model.vocab_size:
            raise ValueError(
                f"the vocabulary has {vocabulary.tokens} tokens, the model {model.vocab_size}"
            )
        if config.mtp > 0 and not model.drafts:
            raise ValueError("mtp wants a model that was loaded with its drafting layer")
        self.model = model
        self.config = config
        self.vocabulary = vocabulary
        model_tokens = min(model.context_tokens, config.context_tokens or model.context_tokens)
        # The longest sequence, prompt and answer: one that fills the whole pool can still run alone.
        self.context_tokens = min(model_tokens, config.num_blocks * config.block_tokens)
        self.pool = BlockPool(config.num_blocks)
        columns = RowCounts(config.max_sequences, config.block_tokens)
        lookahead = Lookahead(self.pool, columns, config.block_tokens, config.mtp)
        self.publishing = Publishing(
            self.pool,
            columns,
            lookahead,
            hasher if config.prefix_cache else None,
            block_tokens=config.block_tokens,
            answers_apart=model.answers_apart,
        )
        self.stages = Stages(self.pool, columns, self.publishing, max_waiting=config.max_waiting)
        self.admission = Admission(
            self.pool, self.stages, lookahead, self.publishing, block_tokens=config.block_tokens
        )
        balance = None
        if lockstep is not None and config.prompt_wait_rounds > 0:
            balance = PromptBalance(config.prompt_wait_rounds)
        self.scheduler = Scheduler(
            self.pool,
            self.stages,
            self.admission,
            lookahead,
            block_tokens=config.block_tokens,
            max_batched_tokens=config.max_batched_tokens,
            balance=balance,
        )
        self.kv_exports = KvExports(config.block_tokens)
        self.rounds = None
        if lockstep is not None:
            self.rounds = Rounds(lockstep, model, drafts=config.mtp > 0, balance=balance)
        self._forward = Forward(
            model,
            config,
            self.kv_exports,
            context_tokens=self.context_tokens,
            clock=clock,
            rounds=self.rounds,
        )
        self._intake = Intake(
            vocab_size=model.vocab_size,
            model_tokens=model_tokens,
            context_tokens=self.context_tokens,
            vocabulary=vocabulary,
            pools=model.pooled_width > 0,
        )
        self.kv_imports = KvImports(self.stages, self.publishing)
        self.pinned = PinnedBlocks(self.pool, self.stages, self.admission)
        self._requests = Requests(self.stages, self.kv_imports)
        self._outputs = OutputBuilder(self.stages, self.admission, self._requests)
        self.steps = StepsInFlight(
            self.scheduler,
            self._forward,
            self._requests,
            self._outputs,
            kv_imports=self.kv_imports,
            kv_exports=self.kv_exports,
            publishing=self.publishing,
            rounds=self.rounds,
        )

    @property
    def grammar_totals(self) -> GrammarTotals:
        """What was spent on rules of answers so far."""
        masks, mask_us, late, wait_us, put_off = self._forward.grammars.times()
        totals = GrammarTotals(masks, mask_us, late, wait_us, put_off=put_off)
        known = self.vocabulary
        if known is None:
            return totals
        return replace(
            totals,
            compiled=known.compiled,
            compile_us=known.compile_us,
            known=known.found,
            refused=known.refused,
            memory_bytes=known.memory_bytes,
        )

    @property
    def idle(self) -> bool:
        """A step would compute nothing, and nothing is due before `next_deadline_s`, until something new comes."""
        return self.stages.idle

    @property
    def empty(self) -> bool:
        """No request is here, not even one that ended and whose blocks are still written to."""
        return self._requests.empty

    @property
    def load(self) -> Load:
        return Load(
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            running=len(self.stages.running),
            waiting=len(self.stages.waiting) - self.stages.importing,
            preemptions=self.stages.preemptions,
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before all requests decode."""
        return self.stages.waiting_tokens

    def prompts(self) -> list[tuple[int, int, int]]:
        """Prompts without a first token, in order: the link of each, its tokens, and those still to be computed."""
        running = [
            (sequence.key.link, sequence.total, sequence.total - sequence.computed)
            for sequence in self.stages.running
            if sequence.total == sequence.prompt_len
        ]
        waiting = [
            (sequence.key.link, sequence.total, self.admission.lacks(sequence))
            for sequence in self.stages.waiting
            if sequence.kv_import is None
        ]
        return running + waiting

    @property
    def next_deadline_s(self) -> float:
        """When `step` or `expire` has to be called even if the engine is idle; infinite where nothing is due."""
        return min(self._requests.next_due_s, self.kv_imports.next_late_s)

    def submit(self, submit: Submit, *, link: int = 0, now_s: float = 0.0) -> None:
        """Take a request. Raises `RequestError`; then the engine is as before.

        With `kv_from` it holds nothing until its ticket comes, or until `go_on` says that nothing does.
        """
        key = Key(link, submit.request)
        self._requests.check_new(key)
        sequence = self._intake.sequence(key, submit, now_s)
        self.stages.check_queue(self.kv_imports.outside)
        # After all that may refuse it: long prompts take their time.
        sequence.names = self.publishing.names_of(sequence)
        if sequence.kv_import is not None:
            self.kv_imports.expect(sequence)
        else:
            self.stages.wait(sequence)
        self._requests.add(sequence)

    def cancel(self, key: Key) -> int | None:
        """Stop a request at any stage; returns how many blocks it gave back, 0 if it is unknown.

        `None` where a mover may still write to its blocks: it is among `kv_imports.stops`, and `kv_imports.ended`
        returns how many blocks it gave back.
        """
        if sequence := self._requests.get(key):
            return self._requests.end(sequence)
        return None if key in self.kv_imports else 0

    def cancel_link(self, link: int) -> int:
        """Cancel all requests of a link; returns how many there were. Pulls in flight end as with `cancel`."""
        keys = [key for key in self._requests.here if key.link == link]
        for key in keys:
            self.cancel(key)
        return len(keys)

    def go_on(self, key: Key, generated: list[int], now_s: float = 0.0) -> None:
        """The first tokens of a request whose KV is pulled. None: nothing comes, compute it all.

        A pull that is not done `timeout_ms` later is given up. Raises `RequestError` for tokens that cannot be; then
        nothing changed. Unknown requests and further calls: no effect.
        """
        if sequence := self.kv_imports.awaiting_tokens(key):
            self._intake.check_first(sequence, generated)
            self.kv_imports.go_on(sequence, generated, now_s)

    def released(self, key: Key) -> int | None:
        """The puller has all of an export. Returns how many blocks it gave back (`Freed` is due).

        `None` where it is over already, or where its first token is still to come: then the step says `Freed`.
        """
        sequence = self._requests.get(key)
        if sequence is None or sequence.export is None:
            return None
        if sequence.stage is Stage.PARKED:
            return self._requests.end(sequence)
        sequence.export.released = True
        return None

    def use_hasher(self, hasher: BlockHasher) -> None:
        """Name blocks otherwise from now on. Nothing cached so far is found again."""
        self.publishing.rename(hasher, self._requests.here.values(), self.kv_imports.leaving)
        self.pinned.renamed()
        self.stages.changed()  # what somebody waits for may have another name now

    def abandon(self, kind: FailureKind, message: str) -> StepResult:
        """Fail all requests: they may go on elsewhere. Exports with their first token out are only freed."""
        result = StepResult(step=self.steps.finished)
        for sequence in list(self._requests.here.values()):
            if sequence.lease_end_s is not None:
                self._outputs.free(sequence, result)
            else:
                self._outputs.fail(sequence, RequestError(kind, message), result)
        return result

    def step(self, now_s: float = 0.0) -> StepResult:
        """Compute one step. Never raises for what a request or the model did.

        In a group it is one round, for which other ranks are waited for even if there is nothing to compute here.
        """
        began_s = time.monotonic()
        result = self.expire(now_s)
        if (step := self.steps.begin(result)) is None:
            if self.rounds is not None:
                self.steps.tell_waiting()
                self.rounds.join_one()
            return result
        step.run()
        step.read()
        return self.steps.finish(step, now_s + time.monotonic() - began_s)

    def expire(self, now_s: float) -> StepResult:
        """End what is due by now. Part of every step; for an idle engine it is enough."""
        result = StepResult(step=self.steps.finished)
        for sequence in self._requests.due(now_s):
            if sequence.lease_end_s is not None:
                # Its first token is out: the other leg has the last word.
                self._outputs.free(sequence, result)
            else:
                self._outputs.late(sequence, result)
        self.kv_imports.expire(now_s)
        return result

    def check(self) -> None:
        """Assert the invariants of pool and scheduler. Costs O(blocks): for tests and shutdown."""
        self.scheduler.check(self.pinned.held.elements())
        self._requests.check()
        self.kv_imports.check()
        self.steps.check()

    def check_idle(self) -> None:
        """Assert in O(1) that an engine without requests holds no block, but for pinned and adopted ones."""
        if self.empty:
            used = self.pool.used - len(self.pinned.held)
            assert used == 0, f"{used} blocks leaked"

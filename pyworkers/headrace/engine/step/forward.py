"""One order through the model: batch, forward pass, sampled tokens, drafts for the next step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.cache.kv_export import KvExports
from headrace.engine.config import EngineConfig
from headrace.engine.pooling import Floats
from headrace.engine.sampling.grammar import Grammars, StepMasks
from headrace.engine.sampling.host_logits import logits_of
from headrace.engine.sampling.logits import Logits
from headrace.engine.sampling.sampler import Rows, Sampled, Sampler, token_logprobs
from headrace.engine.sampling.verify import ChosenRows, choose
from headrace.engine.speculative.adaptive import Adaptive
from headrace.engine.speculative.draft import Drafter
from headrace.engine.speculative.draft_head import DraftHead
from headrace.engine.speculative.rejection import Rejection
from headrace.engine.step.batch_builder import Prepared, build
from headrace.engine.step.input_batch import InputBatch
from headrace.engine.step.lockstep import RankLoad
from headrace.engine.step.rounds import Rounds
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.rows import places_of
from headrace.engine.step.step import Computed, EngineStep, Read
from headrace.engine.step.work import StepWork, Work
from headrace.wire.frames import TokenLogprob
from headrace_kernels.torch_if_loaded import inference_mode

if TYPE_CHECKING:
    from headrace.engine.step.token_pool import TokenPool
    from headrace.models import Model
    from headrace_kernels.ops import Results


class Forward:
    """The model with what it needs to know of those who have a batch row. `clock` counts seconds.

    With `rounds` each step is a round of a group, in which this rank may turn out to have no rows.

    One thread at a time, and step after step in the order of the engine. Of a sequence it reads only what does not
    change while it has its batch row; its penalties are this class's own.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kv_exports: KvExports,
        *,
        context_tokens: int,
        clock: Callable[[], float],
        rounds: Rounds | None = None,
    ) -> None:
        self._model = model
        self._kv_exports = kv_exports
        self._rounds = rounds
        if rounds is not None:
            clock = _clock_of_own_time(clock, rounds)
        self._clock = clock
        rejects = config.mtp > 0 and config.mtp_verify == "rejection"
        self._sampler = Sampler(model.vocab_size, config.max_sequences, whole_masks=rejects)
        self._input_batch = InputBatch(
            block_tokens=model.block_tokens,
            max_sequences=config.max_sequences,
            max_blocks=-(-context_tokens // config.block_tokens),
            drafts=config.mtp,
        )
        self.grammars = Grammars(model.vocab_size, config.max_sequences)
        # Where a step's end says how far it came, as with drafts, the next one has to wait for that.
        self._pool: TokenPool | None = None
        if model.ahead_on is not None and config.mtp == 0:
            from headrace.engine.step.token_pool import TokenPool  # of tensors

            self._pool = TokenPool(config.max_sequences, model.ahead_on, model.fence)
        self.adaptive: Adaptive | None = None
        self._rejection: Rejection | None = None
        self.drafter: Drafter | None = None
        if config.mtp > 0:
            head = DraftHead(model.vocab_size, model.draft_token_ids)
            if not config.mtp_fixed:
                self.adaptive = Adaptive(config.mtp, config.max_sequences)
            if rejects:
                self._rejection = Rejection(self._sampler, head)
            self.drafter = Drafter(
                model,
                self._sampler,
                self._input_batch,
                self.adaptive,
                self._rejection,
                head=head,
                most=config.mtp,
                clock=clock,
                rounds=rounds,
                grammars=self.grammars,
            )

    @property
    def returns_early(self) -> bool:
        """What `launch` returns may take its time, on any thread."""
        return self._pool is not None

    def launch(self, order: EngineStep) -> Read:
        """Give a step to the model; what this returns waits for the end of it. Both raise whatever the model raises.

        When it is read, or has failed, the device writes to no block any more: what is computed can be read by others,
        and what is freed can be another's.
        """
        self._batch_row(order)
        work, live = order.work, self._input_batch.core.live(order.work.batch_rows)
        if live is not None:
            work = work.where(live)
        try:
            with inference_mode():
                if self._rounds is not None:
                    return self._in_round(self._rounds, order, work)
                return self._launch(order, work) if len(work) else self._nothing(work)
        except BaseException:  # a panic of the Rust code, too
            self._input_batch.ended[work.batch_rows] = True  # the step after it goes without
            self._wait_for_device()
            raise

    def _batch_row(self, order: EngineStep) -> None:
        for added in order.added:
            self._input_batch.take(added)
            self._sampler.take_row(added.sequence, added.batch_row)
            self.grammars.take_row(added)
            if self.adaptive is not None:
                self.adaptive.take_row(added.batch_row)
        if self._pool is not None and order.added:
            some = [added.batch_row for added in order.added]
            self._pool.put(some, [added.newest for added in order.added])
        for table in order.tables:
            self._input_batch.table(table)
        self._input_batch.grow(order.grown)

    def _nothing(self, work: StepWork) -> Read:
        """All sequences of the step ended before it."""
        return partial(self._computed, self._after(work), ChosenRows.none(work), [], [])

    def _in_round(self, rounds: Rounds, order: EngineStep, work: StepWork) -> Read:
        """The step once all ranks have come to it."""
        waited_s = rounds.waited_s
        try:
            with rounds.guard():
                working = rounds.begin(_load_of(order, work))
                if len(work):
                    return self._launch(order, work)
                if working:
                    rounds.pass_without_rows()
                return self._nothing(work)
        finally:
            order.result.waited_us += round((rounds.waited_s - waited_s) * 1e6)

    def _launch(self, order: EngineStep, work: StepWork) -> Read:
        if self.drafter is not None:
            self.drafter.begin(work)
        began_s = self._clock()
        step = build(self._input_batch, work, None if self._pool is None else self._pool.newest)
        masks = self.grammars.begin(step.rows)
        if order.chunks:
            results = self._model.forward(step.batch, self._kv_exports.progress_of(order.chunks))
        else:
            results = self._model.forward(step.batch)
        if self._rounds is not None and self.drafter is None:
            self._rounds.passed()
        if self._pool is not None and self._stays(step):
            return self._leave(step, results, self._pool)
        logits = logits_of(results)
        prompt_logprobs: list[tuple[Work, list[TokenLogprob]]] = []
        if step.prompt_rows:  # their logits come after those of the sampled rows
            sampled = int(step.rows.counts.sum())
            prompt_logprobs = _prompt_logprobs(step, logits.part(sampled, logits.rows))
            logits = logits.part(0, sampled)
        pooled = step.pooled_rows(self._model.pooled) if step.pooled else []
        chosen = self._choose(step, logits, masks)
        if not len(step.batch.logit_rows):  # otherwise the rows that were read came after all KV
            self._wait_for_device()
        if self.adaptive is not None and step.batch.rows == step.rows.counts.sum():
            self.adaptive.forward.note(step.batch.rows, (self._clock() - began_s) * 1e3)
        if self.drafter is not None and self.drafter.follow(step):
            self._wait_for_device()
        return partial(self._computed, self._after(work), chosen, prompt_logprobs, pooled)

    def _stays(self, step: Prepared) -> bool:
        """The host need not see the logits."""
        return not (step.prompt_rows or step.pooled) and self._sampler.takes_best(
            step.rows.batch_rows
        )

    def _leave(self, step: Prepared, results: Results, pool: TokenPool) -> Read:
        """Its tokens are there for the next step; here they are known when they are read."""
        input_batch, rows = self._input_batch, step.rows
        of = rows.batch_rows
        ends = input_batch.ends(of)  # when it is read, others may sit there
        pending = pool.choose(results, of)
        input_batch.computed[step.work.batch_rows] += step.work.counts
        input_batch.total[of] += 1
        after = self._after(step.work)

        def read() -> Computed:
            ids = pending.read()
            chosen = choose(step.work, step.sampled, rows, ends, ids)
            return self._computed(after, chosen, [], [])

        return read

    def _after(self, work: StepWork) -> tuple[Ints, Ints, Ints, Ints]:
        """Where the step leaves its sequences: the first fields of `Computed`."""
        return self._input_batch.core.after(work.batch_rows)

    def _computed(
        self,
        after: tuple[Ints, Ints, Ints, Ints],
        chosen: ChosenRows,
        prompt_logprobs: list[tuple[Work, list[TokenLogprob]]],
        pooled: list[tuple[Work, Floats]],
    ) -> Computed:
        first = 0 if self.drafter is None else self.drafter.first
        return Computed(*after, chosen, prompt_logprobs, pooled, first)

    def _choose(self, step: Prepared, logits: Logits, masks: StepMasks | None) -> ChosenRows:
        """Tokens for all sequences that are sampled, as many as their drafts allow. All stand behind the step now."""
        rows, work = step.rows, step.work
        sampled = self._sampler.sample(logits, rows, masks) if len(step.sampled) else Sampled.none()
        if self._rejection is not None and len(step.sampled):
            self._rejection.judge(logits, rows, sampled)
        put_off: list[int] = [] if masks is None else masks.put_off.tolist()
        (right, columns), penalised = self._input_batch.settle(
            work.batch_rows,
            work.counts,
            sampled_of=rows.batch_rows,
            rows=rows.counts,
            drafts=rows.drafts,
            ids=sampled.ids,
            put_off=put_off,
        )
        chosen = ChosenRows(work, step.sampled, *columns, put_off=frozenset(put_off))
        if masks is not None:
            masks.advance(chosen, rows.batch_rows, self._input_batch.ended)
            masks.note_stuck(chosen, rows, sampled.best)
            self.grammars.leave_rows(rows.batch_rows[self._input_batch.ended[rows.batch_rows]])
        if self.adaptive is not None and len(sampled.ids) > len(right):
            accepted = np.maximum(right - 1, 0)
            checked = rows.counts - 1
            checked[put_off] = 0
            self.adaptive.acceptance.checked(rows.batch_rows, checked, accepted)
        if self._pool is not None and len(right):
            newest = self._input_batch.newest[rows.batch_rows]
            self._pool.put(rows.batch_rows, newest.tolist())
        for row in penalised:
            item = chosen.row(row)
            item.sequence.tell(item.ids)
        if sampled.raw is not None:
            self._add_logprobs(sampled, rows, chosen)
        return chosen

    def _add_logprobs(self, sampled: Sampled, rows: Rows, chosen: ChosenRows) -> None:
        starts, counts = rows.starts, chosen.counts
        offsets = np.arange(len(sampled.ids)) - starts.repeat(rows.counts)
        entries = self._sampler.logprobs(sampled, rows, offsets < counts.repeat(rows.counts))
        for row in places_of(self._sampler.wants_logprobs(rows.batch_rows)).tolist():
            own = entries[starts[row] : starts[row] + counts[row]]
            chosen.logprobs[row] = [entry for entry in own if entry is not None]

    def _wait_for_device(self) -> None:
        if fence := self._model.fence():
            fence.synchronize()


def _prompt_logprobs(step: Prepared, logits: Logits) -> list[tuple[Work, list[TokenLogprob]]]:
    found: list[tuple[Work, list[TokenLogprob]]] = []
    row = 0
    for item, targets in step.prompt_rows:
        rows = logits.part(row, row + len(targets))
        row += len(targets)
        top = item.sequence.sampling.prompt_logprobs or 0
        entries = token_logprobs(rows, targets.astype(np.int64), [top] * len(targets))
        found.append((item, entries))
    return found


def _load_of(order: EngineStep, work: StepWork) -> RankLoad:
    """What this rank brings to the round of its step: `work` are those of its sequences that have not ended."""
    if not len(work):
        return RankLoad(waiting_tokens=order.waiting_tokens)
    result = order.result
    return RankLoad(
        rows=int(work.counts.sum() + work.drafts.sum()),
        prompt_tokens=int(work.counts[~work.decodes].sum()),
        context_tokens=result.kv_tokens + result.prefill_context,
        waiting_tokens=order.waiting_tokens,
        drafts_first=bool(work.begins.any()),
    )


def _clock_of_own_time(clock: Callable[[], float], rounds: Rounds) -> Callable[[], float]:
    """It stands still while other ranks are waited for: what rows cost here does not depend on those of others."""
    return lambda: clock() - rounds.waited_s

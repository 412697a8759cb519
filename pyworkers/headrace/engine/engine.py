"""Continuous batching over one model: requests in, tokens out, one `step` at a time.

Synchronous and without locks: one thread at a time. A step is plan -> batch -> forward -> sample -> commit. Whatever a
request or a model does wrong ends as a named failure of the requests concerned; the engine goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine.batch_builder import BatchBuilder, Prepared
from headrace.engine.block_pool import BlockEvent, BlockPool
from headrace.engine.config import EngineConfig
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.names import BlockNamer
from headrace.engine.penalties import Penalties
from headrace.engine.sampler import Sampler, check_sampling, needs_penalties, token_logprobs
from headrace.engine.schedule import Plan, Scheduler, Work
from headrace.engine.sequence import Key, Sequence
from headrace.frames import Failed, Finish, Freed, Load, Output, Submit, TokenLogprob

if TYPE_CHECKING:
    from headrace.models import Model

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answers:
    """What one link is to hear about its requests."""

    outputs: list[Output] = field(default_factory=list[Output])
    failed: list[Failed] = field(default_factory=list[Failed])
    freed: list[Freed] = field(default_factory=list[Freed])


@dataclass(slots=True)
class StepResult:
    """What one step did. `step` counts the forwards; it stays where none was needed.

    The counts are those of the cost model in `Hello.step_prior`; `ms` is for the caller to fill in.
    """

    step: int = 0
    ms: float = 0.0
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0
    answers: dict[int, Answers] = field(default_factory=dict[int, Answers])  # by link

    def of(self, link: int) -> Answers:
        return self.answers.setdefault(link, Answers())


class Engine:
    """One model, its KV blocks, and the requests on them."""

    def __init__(self, model: Model, config: EngineConfig, namer: BlockNamer) -> None:
        self.model = model
        self.config = config
        self._model_tokens = min(
            model.context_tokens, config.context_tokens or model.context_tokens
        )
        # The longest sequence, prompt and answer: one that fills the whole pool can still run alone.
        self.context_tokens = min(self._model_tokens, config.num_blocks * config.block_tokens)
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
        self._sampler = Sampler(model.vocab_size, config.max_sequences)
        self._builder = BatchBuilder(
            block_tokens=config.block_tokens,
            max_sequences=config.max_sequences,
            max_blocks=-(-self.context_tokens // config.block_tokens),
        )
        self._sequences: dict[Key, Sequence] = {}
        self._deadlines = 0  # sequences that have one
        self._arrivals = 0
        self._steps = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def load(self) -> Load:
        return Load(
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before all requests decode: of those that wait, and of those whose prompt is under way.

        What the prefix cache gives is known, and left out, from a request's start on.
        """
        tokens = sum(sequence.total for sequence in self.scheduler.waiting)
        for sequence in self.scheduler.running:
            remaining = sequence.remaining
            if remaining > 1 or not sequence.generated:  # it does not decode
                tokens += remaining
        return tokens

    @property
    def steps(self) -> int:
        """Steps so far that computed something."""
        return self._steps

    def submit(self, submit: Submit, *, link: int = 0, now_s: float = 0.0) -> None:
        """Take a request. Raises `RequestError`; then the engine is as before."""
        key = Key(link, submit.request)
        if key in self._sequences:
            raise RequestError(
                FailureKind.DUPLICATE_REQUEST, f"request {submit.request} is here already"
            )
        sequence = self._sequence(key, submit, now_s)
        self.scheduler.add(sequence)
        self._sequences[key] = sequence
        self._arrivals += 1
        self._deadlines += sequence.deadline_s is not None

    def _sequence(self, key: Key, submit: Submit, now_s: float) -> Sequence:
        if submit.kv_from is not None:
            raise RequestError(
                FailureKind.UNSUPPORTED, "this worker does not pull KV from another one"
            )
        sampling = submit.sampling
        check_sampling(sampling, self.model.vocab_size, prompt_tokens=len(submit.tokens) // 4)
        prompt = self._tokens(submit.tokens, "prompt")
        if not len(prompt):
            raise RequestError(FailureKind.EMPTY_PROMPT, "the prompt has no token")
        resumed = self._tokens(submit.resume.generated, "resume") if submit.resume else prompt[:0]
        limit = min(len(prompt) + submit.max_tokens, self.context_tokens)
        self._check_length(len(prompt), len(resumed), limit, submit)
        stop_ids = frozenset(i for i in submit.stop_ids if i < self.model.vocab_size)
        generated = resumed.tolist()
        return Sequence(
            key=key,
            arrival=self._arrivals,
            priority=submit.priority,
            prompt=prompt,
            generated=generated,
            limit=limit,
            sampling=sampling,
            stop_ids=frozenset() if sampling.ignore_eos else stop_ids,
            salt=submit.salt,
            deadline_s=None if submit.deadline_ms is None else now_s + submit.deadline_ms / 1e3,
            names=self._names(submit.salt, np.concatenate([prompt, resumed])),
            penalties=(
                Penalties(prompt, generated, with_prompt=sampling.repetition_penalty != 1)
                if needs_penalties(sampling)
                else None
            ),
            # A resumed answer has sent them already.
            prompt_logprobs=(
                [] if sampling.prompt_logprobs is not None and not generated else None
            ),
        )

    def _tokens(self, data: bytes, what: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if len(data) % 4:
            raise RequestError(
                FailureKind.BAD_TOKEN, f"{what}: {len(data)} bytes are no list of 4-byte tokens"
            )
        ids = np.frombuffer(data, dtype="<u4")
        if len(ids) and (worst := int(ids.max())) >= self.model.vocab_size:
            raise RequestError(
                FailureKind.BAD_TOKEN,
                f"{what}: token {worst} is not in the vocabulary of {self.model.vocab_size}",
            )
        return ids.astype(np.int32)

    def _check_length(self, prompt: int, resumed: int, limit: int, submit: Submit) -> None:
        only_prompt = submit.max_tokens == 0
        if only_prompt and submit.sampling.prompt_logprobs is None:
            raise RequestError(
                FailureKind.BAD_SAMPLING, "max_tokens is 0 and no prompt_logprobs are wanted"
            )
        shortest = prompt + (0 if only_prompt else 1)
        if shortest > self._model_tokens:
            raise RequestError(
                FailureKind.TOO_LONG,
                f"the prompt is {prompt} tokens, the context is {self._model_tokens}",
            )
        if shortest > self.context_tokens:
            raise RequestError(
                FailureKind.TOO_BIG_FOR_POOL,
                f"the prompt is {prompt} tokens, the KV pool holds {self.context_tokens}",
            )
        if resumed and prompt + resumed >= limit:
            raise RequestError(
                FailureKind.BAD_RESUME,
                f"{resumed} tokens are generated, and {limit - prompt} is all there may be",
            )

    def _names(
        self, salt: bytes, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> list[bytes]:
        if not self.config.prefix_cache:
            return []
        return self._namer.follow(None, tokens, salt)

    def cancel(self, key: Key) -> int:
        """Stop a request at any stage; returns how many blocks it gave back, 0 if it is unknown."""
        sequence = self._sequences.get(key)
        return 0 if sequence is None else self._end(sequence)

    def cancel_link(self, link: int) -> int:
        """Cancel all requests of a link; returns how many there were."""
        keys = [key for key in self._sequences if key.link == link]
        for key in keys:
            self.cancel(key)
        return len(keys)

    def use_namer(self, namer: BlockNamer) -> None:
        """Name blocks otherwise from now on. Nothing cached so far is found again."""
        self._namer = namer
        self.pool.clear_names()
        for sequence in self._sequences.values():
            names = self._names(sequence.salt, sequence.tokens(0, sequence.total))
            self.scheduler.rename(sequence, names)
        for sequence in self.scheduler.running:
            self._publish(sequence)

    def abandon(self, kind: FailureKind, message: str) -> StepResult:
        """Fail all requests: they may go on elsewhere."""
        result = StepResult(step=self._steps)
        for sequence in list(self._sequences.values()):
            self._fail(sequence, RequestError(kind, message), result)
        return result

    def take_events(self) -> list[BlockEvent]:
        """Which blocks came into the cache and left it since the last call."""
        return self.pool.take_events()

    def step(self, now_s: float = 0.0) -> StepResult:
        """Compute one step. Never raises for what a request or the model did."""
        result = StepResult()
        if self._deadlines:
            self._expire(now_s, result)
        plan = self.scheduler.plan()
        if plan.work:
            self._steps += 1
            self._count(plan.work, result)
            self._compute(plan, result)
        result.step = self._steps
        return result

    def _count(self, work: list[Work], result: StepResult) -> None:
        for item in work:
            start, count = item.sequence.computed, item.count
            if item.sequence.decodes:
                result.decode_rows += 1
            else:
                result.prefill_tokens += count
                result.prefill_context += count * start + count * (count - 1) // 2
            result.kv_tokens += start + count

    def _compute(self, plan: Plan, result: StepResult) -> None:
        try:
            for sequence in plan.admitted:
                self._builder.seat(sequence)
                self._sampler.seat(sequence)
            step = self._builder.build(plan.work)
            with torch.inference_mode():
                logits = self.model.forward(step.batch)
                prompt_logprobs = self._prompt_logprobs(step, logits)
                sampled = self._sampler.sample(logits[: len(step.sampled)], step.sampled)
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
        for sequence, entries in prompt_logprobs:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs += entries
            if sequence.limit == sequence.prompt_len == sequence.computed:
                if any(math.isnan(entry.logprob) for entry in sequence.prompt_logprobs):
                    self._fail(sequence, _not_finite(), result)
                else:
                    self._answer(sequence, [], None, "length", result)
        for sequence, token, logprob in zip(
            step.sampled, sampled.ids, sampled.logprobs, strict=True
        ):
            if token is None:
                self._fail(sequence, _not_finite(), result)
            else:
                self._accept(sequence, token, logprob, result)

    def _prompt_logprobs(
        self, step: Prepared, logits: torch.Tensor
    ) -> list[tuple[Sequence, list[TokenLogprob]]]:
        found: list[tuple[Sequence, list[TokenLogprob]]] = []
        row = len(step.sampled)
        for sequence, targets in step.prompt_rows:
            rows = logits[row : row + len(targets)]
            row += len(targets)
            top = sequence.sampling.prompt_logprobs or 0
            entries = token_logprobs(rows, targets.astype(np.int64), [top] * len(targets))
            found.append((sequence, entries))
        return found

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
        if self.scheduler.publish(sequence):
            self._builder.seat(sequence)

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
            if finish != "cancelled":
                self.scheduler.note_answer(len(sequence.generated))
            self._free(sequence, result)

    def _fail(self, sequence: Sequence, error: RequestError, result: StepResult) -> None:
        result.of(sequence.key.link).failed.append(error.frame(sequence.key.request))
        self._free(sequence, result)

    def _free(self, sequence: Sequence, result: StepResult) -> None:
        freed = Freed(request=sequence.key.request, blocks=self._end(sequence))
        result.of(sequence.key.link).freed.append(freed)

    def _end(self, sequence: Sequence) -> int:
        del self._sequences[sequence.key]
        self._deadlines -= sequence.deadline_s is not None
        return self.scheduler.remove(sequence)

    def _expire(self, now_s: float, result: StepResult) -> None:
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s
        ]
        for sequence in late:
            sequence.prompt_logprobs = None  # perhaps not complete
            self._answer(sequence, [], None, "cancelled", result)

    def check(self) -> None:
        """Assert the invariants of pool and scheduler. Costs O(blocks): for tests and shutdown."""
        self.scheduler.check()
        running: Iterable[Sequence] = self.scheduler.running
        known = {id(s) for s in (*running, *self.scheduler.waiting)}
        assert known == {id(s) for s in self._sequences.values()}, "a request is lost"

    def check_idle(self) -> None:
        """Assert in O(1) that an engine without requests holds no block."""
        assert not self._sequences, "an idle engine knows requests"
        assert self.pool.used == 0, f"{self.pool.used} blocks leaked"


def _not_finite() -> RequestError:
    return RequestError(FailureKind.ENGINE, "the model's logits are not finite")

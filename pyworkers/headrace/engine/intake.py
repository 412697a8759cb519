"""From a `Submit` frame to a sequence, or to the reason why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace._core import AnswerRules
from headrace.engine.cache.kv_import import KvImport
from headrace.engine.errors import FailureKind, RequestError
from headrace.engine.pooling import PooledPrompt, check_pooling
from headrace.engine.sampling.penalties import Penalties
from headrace.engine.sampling.sampler import check_sampling, needs_penalties
from headrace.engine.sampling.token_limits import AnswerLimits
from headrace.engine.sequence import Key, Sequence
from headrace.wire.frames import Grammar, Sampling, Submit

if TYPE_CHECKING:
    from headrace._core import CompiledGrammar, GrammarVocabulary


class Intake:
    """Checks requests. `model_tokens` is the longest sequence of the model, `context_tokens` that of the engine,
    whose pool may be smaller.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        model_tokens: int,
        context_tokens: int,
        vocabulary: GrammarVocabulary | None = None,
        pools: bool = False,
    ) -> None:
        self._pools = pools
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._model_tokens = model_tokens
        self._context_tokens = context_tokens
        self._taken = 0

    def sequence(self, key: Key, submit: Submit, now_s: float) -> Sequence:
        """The sequence of a request, without block names yet. Raises `RequestError`."""
        if submit.kv_from is not None and submit.kv_transfer is not None:
            text = "a leg that pulls its KV cannot hand it off as well"
            raise RequestError(FailureKind.UNSUPPORTED, text)
        if submit.pooling is not None:
            check_pooling(submit, pools=self._pools)
        sampling = submit.sampling
        check_sampling(sampling, self._vocab_size, prompt_tokens=len(submit.tokens) // 4)
        prompt = self._tokens(submit.tokens, "prompt")
        if not len(prompt):
            raise RequestError(FailureKind.EMPTY_PROMPT, "the prompt has no token")
        resumed = self._tokens(submit.resume.generated, "resume") if submit.resume else prompt[:0]
        limit = min(len(prompt) + submit.max_tokens, self._context_tokens)
        self._check_length(len(prompt), len(resumed), limit, submit)
        stop_ids = frozenset(i for i in submit.stop_ids if i < self._vocab_size)
        generated = resumed.tolist()
        kv_import = None
        if submit.kv_from is not None:
            kv_import = KvImport(key, submit.kv_from, tokens=len(prompt) + len(generated))
        # A resumed answer has sent them already; of a prompt that is computed elsewhere they come from there.
        scores = sampling.prompt_logprobs is not None and not generated and kv_import is None
        rules = self._rules(sampling)
        self._taken += 1
        return Sequence(
            key=key,
            arrival=self._taken,
            priority=submit.priority,
            prompt=prompt,
            listed=generated,
            limit=limit,
            sampling=sampling,
            stop_ids=frozenset() if sampling.ignore_eos else stop_ids,
            salt=submit.salt,
            deadline_s=None if submit.deadline_ms is None else now_s + submit.deadline_ms / 1e3,
            names=[],
            penalties=(
                Penalties(prompt, generated, with_prompt=sampling.repetition_penalty != 1)
                if needs_penalties(sampling)
                else None
            ),
            rules=rules,
            limits=None if sampling.limits is None else AnswerLimits(sampling.limits, generated),
            prompt_logprobs=[] if scores else None,
            pooled=None if submit.pooling is None else PooledPrompt(submit.pooling, len(prompt)),
            export_lease_ms=None if submit.kv_transfer is None else submit.kv_transfer.lease_ms,
            export_pull_key=b"" if submit.kv_transfer is None else submit.kv_transfer.pull_key,
            kv_import=kv_import,
        )

    def _rules(self, sampling: Sampling) -> AnswerRules | None:
        """What the answer has to follow."""
        reasoning = sampling.reasoning
        if sampling.grammar is None and reasoning is None:
            return None
        grammar = None if sampling.grammar is None else self._compiled(sampling.grammar)
        if reasoning is None:
            return AnswerRules(grammar)
        for token in (*reasoning.begin, *reasoning.end, *reasoning.ends_too):
            if token >= self._vocab_size:
                raise RequestError(
                    FailureKind.BAD_TOKEN,
                    f"reasoning: token {token} is not in the vocabulary of {self._vocab_size}",
                )
        r = reasoning
        try:
            return AnswerRules(
                grammar, (r.begin, r.end, r.max_tokens, r.begun, r.ends_too), self._vocabulary
            )
        except ValueError as error:
            raise RequestError(FailureKind.BAD_SAMPLING, f"reasoning: {error}") from error

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar that was not seen before takes milliseconds, in which the engine takes in nothing else: a worker
        has compiled it before.
        """
        if self._vocabulary is None:
            text = "this worker knows no tokens by their text, so it cannot follow a grammar"
            raise RequestError(FailureKind.UNSUPPORTED, text)
        try:
            return self._vocabulary.compile(grammar.kind, grammar.source)
        except ValueError as error:
            raise RequestError(FailureKind.BAD_SAMPLING, f"grammar: {error}") from error
        except MemoryError as error:  # another worker may have room
            raise RequestError(FailureKind.QUEUE_FULL, f"grammar: {error}") from error

    def _tokens(self, data: bytes, what: str) -> NDArray[np.int32]:
        if len(data) % 4:
            raise RequestError(
                FailureKind.BAD_TOKEN, f"{what}: {len(data)} bytes are no list of 4-byte tokens"
            )
        ids = np.frombuffer(data, dtype="<u4")
        if len(ids) and (worst := int(ids.max())) >= self._vocab_size:
            raise RequestError(
                FailureKind.BAD_TOKEN,
                f"{what}: token {worst} is not in the vocabulary of {self._vocab_size}",
            )
        return ids.astype(np.int32)

    def _check_length(self, prompt: int, resumed: int, limit: int, submit: Submit) -> None:
        only_prompt = submit.max_tokens == 0
        computes_prompt = submit.sampling.prompt_logprobs is not None or submit.pooling is not None
        if only_prompt and not computes_prompt:
            raise RequestError(
                FailureKind.BAD_SAMPLING,
                "max_tokens is 0, and neither prompt_logprobs nor a pooled prompt are wanted",
            )
        shortest = prompt + (0 if only_prompt else 1)
        if shortest > self._model_tokens:
            raise RequestError(
                FailureKind.TOO_LONG,
                f"the prompt is {prompt} tokens, the context is {self._model_tokens}",
            )
        if shortest > self._context_tokens:
            raise RequestError(
                FailureKind.TOO_BIG_FOR_POOL,
                f"the prompt is {prompt} tokens, the KV pool holds {self._context_tokens}",
            )
        if resumed and prompt + resumed >= limit:
            raise RequestError(
                FailureKind.BAD_RESUME,
                f"{resumed} tokens are generated, and {limit - prompt} is all there may be",
            )

    def check_first(self, sequence: Sequence, generated: list[int]) -> None:
        """Whether an answer may go on after these tokens. Raises `RequestError`."""
        for token in generated:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    FailureKind.BAD_TOKEN,
                    f"continue: token {token} is not in the vocabulary of {self._vocab_size}",
                )
        if generated and sequence.total + len(generated) >= sequence.limit:
            raise RequestError(
                FailureKind.BAD_RESUME,
                f"{len(generated)} more tokens leave nothing to generate",
            )

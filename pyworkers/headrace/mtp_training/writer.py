"""The model writes answers to prompts; of each token its final hidden state and likely successors are kept.

All goes through the engine's own kernels, in the dtype that serves, since a drafter reads just those hidden states.
Sequences join and leave one running batch. What a sequence becomes depends on its number alone, not on its company:
the kernels are batch invariant and its noise has its number as seed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.sampling import noise
from headrace.models.llama import attention_of, load_weights
from headrace.models.llama import forward as describe
from headrace.models.load.checkpoint import Checkpoint
from headrace.mtp_training.prompts import Prompt
from headrace_kernels.batch import Batch
from headrace_kernels.native import NativeBackend
from headrace_kernels.upload import tensor_of

BLOCK_TOKENS = 16
CANDIDATES = 64  # most likely tokens among which a sampled one is drawn
ADMITTED = 3  # prompts that join in one step; bounds the memory of its logits
KEPT = 16  # most likely tokens that are kept with their logits

Token = NDArray[np.int32]


class TokenizerMissingError(ValueError):
    """The packages that turn text into tokens are not installed."""


class Encoder:
    """Text to tokens, chat through the model's own template."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
            jinja2: Any = importlib.import_module("jinja2")
        except ImportError as error:
            raise TokenizerMissingError(
                f"writing text needs the package {error.name}: `pip install tokenizers jinja2`"
            ) from error
        files = checkpoint.model_files()
        if files.chat_template is None:
            raise ValueError(f"{checkpoint.path}: no chat template, so it cannot write chat")
        self._tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer)
        self._template = jinja2.Template(files.chat_template)

    def encode(self, prompt: Prompt, most_tokens: int) -> list[int]:
        """The prompt's tokens, at most the last `most_tokens` of them."""
        text = prompt.text
        if prompt.kind == "chat":
            messages = [{"role": "user", "content": text}]
            text = self._template.render(messages=messages, add_generation_prompt=True)
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids[-most_tokens:]
        if not tokens:
            raise ValueError("a prompt is empty")
        return tokens


@dataclass(slots=True, kw_only=True)
class Written:
    """One prompt and its answer. Rows are those that the model computed: all tokens but the last one."""

    index: int
    kind: str
    temperature: float
    prompt_len: int
    tokens: Token  # [rows + 1]
    hidden: NDArray[np.float16]  # [rows, hidden], after the final norm
    top_ids: NDArray[np.int32]  # [rows, KEPT], best first
    top_logits: NDArray[np.float16]  # [rows, KEPT], log-probabilities among the candidates


@dataclass(slots=True)
class _Running:
    lane: int
    index: int
    prompt: Prompt
    temperature: float
    tokens: list[int]
    prompt_len: int
    limit: int
    computed: int = 0
    hidden: list[NDArray[np.float16]] = field(default_factory=list[NDArray[np.float16]])
    top_ids: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    top_logits: list[NDArray[np.float16]] = field(default_factory=list[NDArray[np.float16]])

    def written(self) -> Written:
        return Written(
            index=self.index,
            kind=self.prompt.kind,
            temperature=self.temperature,
            prompt_len=self.prompt_len,
            tokens=np.array(self.tokens, np.int32),
            hidden=np.concatenate(self.hidden),
            top_ids=np.concatenate(self.top_ids),
            top_logits=np.concatenate(self.top_logits),
        )


class Writer:
    """The model, with lanes for `lanes` sequences of at most `most_tokens` tokens."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        lanes: int,
        most_tokens: int,
        answer_tokens: int,
    ) -> None:
        config = checkpoint.config
        if config.model_type != "llama":
            raise ValueError(
                f"{checkpoint.path}: model_type {config.model_type!r}, expected 'llama'"
            )
        if most_tokens <= answer_tokens:
            raise ValueError(f"sequences of {most_tokens} tokens leave no room for a prompt")
        if most_tokens > config.context_tokens:
            raise ValueError(
                f"prompt and answer of {most_tokens} tokens, the model's limit is {config.context_tokens}"
            )
        self._encoder = Encoder(checkpoint)
        self._vocab = config.vocab_size
        self._stop = set(config.eos_token_ids)
        self._most_tokens, self._answer_tokens = most_tokens, answer_tokens
        blocks = math.ceil(most_tokens / BLOCK_TOKENS)
        self._tables = np.arange(lanes * blocks, dtype=np.int32).reshape(lanes, blocks)
        backend = NativeBackend(attention_of(config, BLOCK_TOKENS), dtype=dtype)
        weights = load_weights(checkpoint, backend)
        # The identity under the head: one pass gives the logits and what they are made of.
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = checkpoint.tensor(f"{name}.weight")
        weights = replace(
            weights, head=backend.matrix([head, np.eye(config.hidden_size, dtype=np.float32)])
        )
        self._run = backend.compile(lambda step: describe(step, weights, config.rms_norm_eps))
        backend.allocate_kv(lanes * blocks)

    def write(self, jobs: Iterable[tuple[int, Prompt, float]]) -> Iterator[Written]:
        """Answer (number, prompt, temperature), in the order in which answers end."""
        waiting = iter(jobs)
        free = list(range(len(self._tables)))
        running: list[_Running] = []
        more = True
        while more or running:
            admitted = 0
            while more and free and admitted < ADMITTED:
                admitted += 1
                job = next(waiting, None)
                if job is None:
                    more = False
                else:
                    running.append(self._start(free.pop(), *job))
            if running:
                self._step(running)
            for sequence in [s for s in running if s.computed == s.limit - 1 or self._stopped(s)]:
                running.remove(sequence)
                free.append(sequence.lane)
                yield sequence.written()

    def _start(self, lane: int, index: int, prompt: Prompt, temperature: float) -> _Running:
        tokens = self._encoder.encode(prompt, self._most_tokens - self._answer_tokens)
        limit = len(tokens) + self._answer_tokens
        return _Running(lane, index, prompt, temperature, tokens, len(tokens), limit)

    def _stopped(self, sequence: _Running) -> bool:
        return len(sequence.tokens) > sequence.prompt_len and sequence.tokens[-1] in self._stop

    def _step(self, running: list[_Running]) -> None:
        """Compute all that is known of every sequence, and choose the next token of each."""
        out = tensor_of(self._run(self._batch(running)))  # [rows, vocab + hidden]
        logits = out[:, : self._vocab]
        top = logits.topk(min(CANDIDATES, self._vocab), dim=1)
        total = top.values.logsumexp(1, keepdim=True)  # of all tokens it would cost 7 % more time
        top_ids = top.indices.numpy().astype(np.int32)
        top_logits = (top.values - total).numpy()
        hidden = out[:, self._vocab :].to(torch.float16).numpy()
        end = 0
        for sequence in running:
            start, end = end, end + len(sequence.tokens) - sequence.computed
            sequence.hidden.append(hidden[start:end])
            sequence.top_ids.append(top_ids[start:end, :KEPT].copy())
            sequence.top_logits.append(top_logits[start:end, :KEPT].astype(np.float16))
            sequence.computed = len(sequence.tokens)
            sequence.tokens.append(_draw(top_ids[end - 1], top_logits[end - 1], sequence))

    def _batch(self, running: list[_Running]) -> Batch:
        counts = [len(s.tokens) - s.computed for s in running]
        positions = np.concatenate([np.arange(s.computed, len(s.tokens)) for s in running])
        tables = self._tables[[s.lane for s in running]]
        blocks = tables[np.repeat(np.arange(len(running)), counts), positions // BLOCK_TOKENS]
        return Batch(
            tokens=np.concatenate([np.array(s.tokens[s.computed :], np.int32) for s in running]),
            positions=positions.astype(np.int32),
            slots=blocks.astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            seq_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=np.array([len(s.tokens) for s in running], np.int32),
            block_tables=np.ascontiguousarray(tables),
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )


def _draw(ids: NDArray[np.int32], logits: NDArray[np.float32], sequence: _Running) -> int:
    """The most likely token, or one drawn as the engine's sampler draws, with the sequence's number as seed."""
    if not sequence.temperature:
        return int(ids[0])
    place = np.array([len(sequence.tokens)], np.int64)
    key, key2 = noise.keys(np.array([sequence.index], np.uint64), place)
    time = np.log(noise.exponential(noise.bits(ids.astype(np.uint32), key, key2)))
    return int(ids[np.argmin(time - logits.astype(np.float64) / sequence.temperature)])

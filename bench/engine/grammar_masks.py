"""What it costs to hold answers to a JSON schema of 50 fields: microseconds a token and sequence.

    python -m bench.engine.grammar_masks --out bench/results/grammar_masks.json

"fill" is the time of the thread that fills masks, which runs beside the model; "wait" is what is left of it when the
model is done, which here takes no time at all; "step" is one of the engine with 32 such answers, beside the same step
without a grammar in the same run, turn by turn. The vocabulary is that of the default model, and one of 129,280 tokens
that is made of it by joining tokens in pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.step_overhead import BLOCK, NoModel
from bench.helpers.report import write
from headrace._core import GrammarVocabulary
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models.load.source import resolve
from headrace.wire.frames import Grammar, GrammarKind, Sampling, Submit
from headrace_kernels.batch import Batch
from headrace_kernels.ops import Progress

LARGE = 129_280
SEQUENCES = 32
ANSWER = 2048
KINDS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 100_000},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {f"field_{i}": KINDS[i % len(KINDS)] for i in range(50)},
    "required": [f"field_{i}" for i in range(50)],
    "additionalProperties": False,
}


class RandomLogits(NoModel):
    """As likely one as the other, but not the same in each step."""

    drafts = False

    def __init__(self, vocabulary: int) -> None:
        super().__init__(right=True, rows=1, vocabulary=vocabulary)
        self._pool = torch.randn(SEQUENCES + 97, vocabulary)
        self._step = 0

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        del progress
        self._step = (self._step + 1) % 97
        return self._pool[self._step : self._step + len(batch.logit_rows)].clone()


def vocabularies() -> dict[str, tuple[GrammarVocabulary, int]]:
    document = resolve("smollm2").doc()
    fields = json.loads(document)
    end = int(fields["eos_token_ids"][0])
    words = byte_words(json.loads(fields["tokenizer"]), int(fields["vocab_size"]))
    made = list(words)
    random = np.random.default_rng(1)
    while len(made) < LARGE:
        left, right = random.integers(0, len(words), 2)
        if 0 < len(words[left]) + len(words[right]) < 32:
            made.append(words[left] + words[right])
    return {
        f"{len(words)}": (GrammarVocabulary(document), end),
        f"{LARGE}": (GrammarVocabulary.of_tokens(made, [end]), end),
    }


def byte_words(tokenizer: dict[str, Any], size: int) -> list[bytes]:
    """The bytes of each token of a byte-level tokenizer; specials begin with a byte that no text has."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    rest = (byte for byte in range(256) if byte not in set(plain))
    letters |= {chr(256 + place): byte for place, byte in enumerate(rest)}
    words = [b""] * size
    for token, place in tokenizer["model"]["vocab"].items():
        words[place] = bytes(letters.get(letter, 255) for letter in token)
    for added in tokenizer["added_tokens"]:
        words[added["id"]] = b"\xff" + added["content"].encode()
    return words


class Load:
    """An engine that always has so many answers, all with a grammar or none."""

    def __init__(self, vocabulary: GrammarVocabulary, end: int, *, constrained: bool) -> None:
        blocks = SEQUENCES * (ANSWER // BLOCK + 2)
        config = EngineConfig(
            num_blocks=blocks,
            block_tokens=BLOCK,
            max_sequences=SEQUENCES,
            max_batched_tokens=1024,
            max_waiting=SEQUENCES,
        )
        model = RandomLogits(vocabulary.tokens)
        hasher = KeyedBlockHasher(bytes(32), BLOCK)
        self.engine = Engine(model, config, hasher, vocabulary=vocabulary)
        self._grammar = Grammar(GrammarKind.JSON, json.dumps(SCHEMA)) if constrained else None
        self._end = end
        self._sent = 0

    def step(self) -> float:
        """Its wall seconds; answers that ended are replaced before."""
        while len(self.engine.stages.running) + len(self.engine.stages.waiting) < SEQUENCES:
            self._sent += 1
            sampling = Sampling(temperature=1.0, seed=self._sent, grammar=self._grammar)
            tokens = np.arange(3, 11, dtype="<u4").tobytes()
            self.engine.submit(Submit(self._sent, tokens, sampling, [self._end], ANSWER))
        began = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - began

    def mask_times(self) -> tuple[int, int, int, int]:
        totals = self.engine.grammar_totals
        return totals.masks, totals.mask_us, totals.late, totals.wait_us


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    return {"p50": statistics.median(values), "mean": statistics.fmean(values), "p90": cuts[8]}


def measure(vocabulary: GrammarVocabulary, end: int, steps: int) -> dict[str, Any]:
    with_grammar = Load(vocabulary, end, constrained=True)
    without = Load(vocabulary, end, constrained=False)
    for _ in range(20):
        with_grammar.step()
        without.step()
    fill: list[float] = []
    wait: list[float] = []
    constrained: list[float] = []
    free: list[float] = []
    for _ in range(steps):
        before = with_grammar.mask_times()
        constrained.append(with_grammar.step() * 1e6 / SEQUENCES)
        masks, fill_us, _, wait_us = (
            a - b for a, b in zip(with_grammar.mask_times(), before, strict=True)
        )
        if masks:
            fill.append(fill_us / masks)
            wait.append(wait_us / masks)
        free.append(without.step() * 1e6 / SEQUENCES)
    return {
        "compile_ms": vocabulary.compile_us / 1e3,
        "fill_us": spread(fill),
        "wait_us": spread(wait),
        "step_us": spread(constrained),
        "step_without_us": spread(free),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        size: measure(vocabulary, end, options.steps)
        for size, (vocabulary, end) in vocabularies().items()
    }
    write(options.out, {"unit": "us a token and sequence", "vocabularies": found})


if __name__ == "__main__":
    main()

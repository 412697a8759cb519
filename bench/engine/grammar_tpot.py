"""What it costs beside a real model to hold answers to a JSON schema of 50 fields: the time per token, in pairs.

    python -m bench.engine.grammar_tpot --out bench/results/grammar_tpot.json

32 sequences of the default model, by the engine and the threads of a worker, with and without the schema of
`grammar_masks.py`: the same prompts, the same lengths, as all answers are cut long before a grammar has finished one.
Turns come in pairs, in one order and then in the other. The time per token is that of the steps in which all sequences
decode; `ratio` is with over without, in each pair. There is neither a router nor a client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch

from bench.engine.grammar_masks import SCHEMA, SEQUENCES, spread
from bench.helpers.report import rounded, write
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import load_model
from headrace.models.load.source import resolve
from headrace.wire.frames import Grammar, GrammarKind, Sampling, Submit
from headrace.worker.load_model import read_vocabulary
from headrace.worker.step_executor import StepExecutor

BLOCK = 16
PROMPT = 48  # tokens
SAMPLINGS = {"drawn": Sampling(temperature=1.0), "greedy": Sampling()}
QUESTIONS = Path(__file__).with_name("gsm8k_questions.txt")


class Turns:
    """One engine with the default model, which answers the same prompts again and again."""

    def __init__(self, answer: int) -> None:
        checkpoint = resolve(None)
        document = checkpoint.doc()
        model = load_model(checkpoint, dtype="auto", device="cpu", block_tokens=BLOCK)
        blocks = SEQUENCES * ((PROMPT + answer) // BLOCK + 2)
        model.allocate_kv(blocks)
        config = EngineConfig(
            num_blocks=blocks,
            block_tokens=BLOCK,
            max_sequences=SEQUENCES,
            max_batched_tokens=SEQUENCES * PROMPT,
            max_waiting=SEQUENCES,
        )
        vocabulary = read_vocabulary(document)
        assert vocabulary is not None, "the tokens of the default model have texts"
        self.vocabulary = vocabulary
        hasher = KeyedBlockHasher(bytes(32), BLOCK)
        self.engine = Engine(model, config, hasher, vocabulary=vocabulary)
        self.model = f"{checkpoint.name} in {model.dtype_name}"
        self._answer = answer
        self._prompts = prompts(json.loads(document))
        self._sent = 0

    def run(self, sampling: Sampling) -> list[float]:
        """Milliseconds of the steps in which all sequences decode."""
        for prompt in self._prompts:
            self._sent += 1
            self.engine.submit(Submit(self._sent, prompt, sampling, [], self._answer))
        return asyncio.run(self._drive())

    async def _drive(self) -> list[float]:
        """The main loop of a worker that nobody talks to, until all answers are there."""
        wake, found, before = asyncio.Event(), list[float](), 0.0
        with StepExecutor(self.engine, wake.set) as executor:
            while not self.engine.idle or executor.busy:
                wake.clear()
                if executor.done:
                    result, now = executor.finish(), time.perf_counter()
                    if before and result.decode_rows == SEQUENCES and not result.prefill_tokens:
                        found.append((now - before) * 1e3)
                    before = now
                elif executor.prepare_s > time.perf_counter() or not executor.begin():
                    left_s = executor.prepare_s - time.perf_counter()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), None if left_s == math.inf else left_s)
        assert len(found) >= self._answer - 3, "all answers are cut at once"
        return found


def prompts(document: dict[str, Any]) -> list[bytes]:
    """Beginnings of questions, all of one length."""
    tokenizer = tokenizers.Tokenizer.from_str(document["tokenizer"])
    ids: list[int] = tokenizer.encode(QUESTIONS.read_text()).ids
    some = [ids[start : start + PROMPT] for start in range(0, SEQUENCES * PROMPT, PROMPT)]
    return [b"".join(token.to_bytes(4, "little") for token in one) for one in some]


def measure(turns: Turns, free: Sampling, pairs: int) -> dict[str, Any]:
    grammar = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))
    held = Sampling(temperature=free.temperature, seed=free.seed, grammar=grammar)
    turns.run(held)
    turns.run(free)
    with_schema: list[float] = []
    without: list[float] = []
    ratios: list[float] = []
    before = turns.engine.grammar_totals
    for pair in range(pairs):
        first = turns.run(free if pair % 2 else held)
        second = turns.run(held if pair % 2 else free)
        own, other = (second, first) if pair % 2 else (first, second)
        ratios.append(statistics.fmean(own) / statistics.fmean(other))
        with_schema += own
        without += other
        print(f"pair {pair}: {ratios[-1]:.3f}", flush=True)
    totals = turns.engine.grammar_totals
    masks, late = totals.masks - before.masks, totals.late - before.late
    return {
        "pairs": pairs,
        "ratio": spread(ratios),
        "ratios": ratios,
        "tpot_ms": spread(with_schema),
        "tpot_without_ms": spread(without),
        "mask_us": (totals.mask_us - before.mask_us) / masks,
        "late_share": late / len(with_schema),
        "wait_us_of_late": (totals.wait_us - before.wait_us) / max(late, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--answer", type=int, default=96, help="tokens of each answer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = Turns(options.answer)
    found: dict[str, Any] = {
        "model": turns.model,
        "sequences": SEQUENCES,
        "answer": options.answer,
    }
    for name, sampling in SAMPLINGS.items():
        found[name] = measure(turns, sampling, options.pairs)
        write(options.out, rounded(found))  # what is done stays, if the next one is cut off


if __name__ == "__main__":
    main()

"""What drafting is worth on a CPU: answers to held-out prompts by the engine, with and without, in turns.

    python -m bench.mtp.throughput --out bench/results/mtp_throughput.json

Every turn answers the same prompts, greedily and `--tokens` tokens each, without drafts and with 1, 2 and 3 at most,
of which the engine chooses the number itself; the engines take their steps in turns, so that whatever else the machine
does disturbs all of them. The prompts are of the stream on which the head was not trained, others in each turn: how
well text can be foreseen differs widely. "times_without" is of all turns together, tokens by CPU seconds; single turns
have a median and a range. CPU seconds are those of the computing thread, in steps that only decode and in which at
least seven eighths of the batch still run: a server would have given the places of the others to those who wait.
"times_without_to_the_end" counts all steps that only decode. The answers are compared token by token.

An engine goes through all turns of a start, as that of a server does, after a warm-up of at least 100 steps. Its very
first answers, in which it finds out what rows cost, are given apart ("times_without_cold"). Engines are made anew at
each of the `--starts`: they share their weights, but two of the same kind still differ by up to 2 % for as long as they
live, by where their caches happen to lie. How much, a second one without drafts shows ("without again").
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.helpers.report import write
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import DType
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.source import resolve
from headrace.mtp_training.prompts import Prompts
from headrace.mtp_training.writer import Encoder
from headrace.wire.frames import Sampling, Submit
from headrace_kernels.native import NativeBackend

BLOCK = 16
MODEL = "smollm2-r1"
DTYPES: tuple[DType, ...] = ("float32", "int8")
SIZES = {1: (1, 1), 8: (4, 1), 32: (8, 2)}  # of a batch; by what turns and starts are divided
DRAFTS = {"without": 0, "without again": 0, "1": 1, "2": 2, "3": 3}  # at most, by the engine's name
WARM_UP_STEPS = 100  # by which the engine knows what rows cost
LONGEST_PROMPT = 192
MISSING = 8  # one sequence of so many may have ended in a step that counts


@dataclass(slots=True)
class Decoded:
    """Tokens, and what they took."""

    tokens: int = 0
    cpu_s: float = 0.0

    def add(self, tokens: int, cpu_s: float) -> None:
        self.tokens += tokens
        self.cpu_s += cpu_s


@dataclass(slots=True)
class Turn:
    """One run over all prompts of a batch."""

    answers: dict[int, list[int]]
    together: Decoded = field(default_factory=Decoded)  # while at least seven eighths ran
    to_the_end: Decoded = field(default_factory=Decoded)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


Engines = dict[str, Engine]


class Models:
    """Models that share their weights, each with a cache of its own."""

    def __init__(self, checkpoint: Checkpoint, dtype: DType) -> None:
        self._config = checkpoint.config
        self._dtype: DType = dtype
        self._weights = load_weights(checkpoint, self._backend(mtp=True), mtp=True)

    def make(self, *, mtp: bool) -> Deepseek:
        weights = self._weights if mtp else dataclasses.replace(self._weights, mtp=None)
        return Deepseek(self._config, weights, self._backend(mtp=mtp), BLOCK)

    def _backend(self, *, mtp: bool) -> NativeBackend:
        return NativeBackend(attention_of(self._config, BLOCK, mtp=mtp), dtype=self._dtype)


def run(engines: Engines, prompts: list[list[int]], tokens: int) -> dict[str, Turn]:
    """Answer all prompts at once with each engine: a step of one, then a step of the next."""
    turns: dict[str, Turn] = {}
    for name, engine in engines.items():
        for request, prompt in enumerate(prompts):
            packed = np.array(prompt, "<u4").tobytes()
            engine.submit(Submit(request, packed, Sampling(temperature=0.0), [], tokens))
        turns[name] = Turn({request: [] for request in range(len(prompts))})
    while not all(engine.empty for engine in engines.values()):
        for name, engine in engines.items():
            if not engine.empty:
                step(engine, turns[name])
    return turns


def step(engine: Engine, turn: Turn) -> None:
    began = time.thread_time()
    result = engine.step()
    spent = time.thread_time() - began
    outputs = [output for answers in result.answers.values() for output in answers.outputs]
    for output in outputs:
        turn.answers[output.request] += output.ids
    if result.prefill_tokens:
        return
    tokens, size = sum(len(output.ids) for output in outputs), len(turn.answers)
    turn.to_the_end.add(tokens, spent)
    if len(outputs) >= size - size // MISSING:
        turn.together.add(tokens, spent)
        turn.steps += 1
        turn.drafted += sum(output.drafted for output in outputs)
        turn.accepted += sum(output.accepted for output in outputs)


def engine_of(models: Models, drafts: int, size: int, tokens: int) -> Engine:
    model = models.make(mtp=drafts > 0)
    blocks = size * -(-(LONGEST_PROMPT + tokens + 8) // BLOCK)
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=size,
        max_batched_tokens=max(4 * size, 256),
        mtp=drafts,
    )
    return Engine(model, config, KeyedBlockHasher(bytes(32), BLOCK), clock=time.thread_time)


def case(
    models: Models,
    prompts: list[list[int]],
    size: int,
    tokens: int,
    rounds: int,
    starts: int,
) -> list[dict[str, Any]]:
    """One batch size: all engines in turns, `rounds` times, made anew `starts` times."""
    colds: list[dict[str, Turn]] = []
    turns: list[dict[str, Turn]] = []
    batches, others = batches_of(prompts, size), batches_of(prompts[::-1], size)
    for start in range(starts):
        engines = {name: engine_of(models, most, size, tokens) for name, most in DRAFTS.items()}
        colds.append(run(engines, next(others), tokens))
        steps = fewest_steps(colds[-1])
        while steps < WARM_UP_STEPS:
            steps += fewest_steps(run(engines, next(others), tokens))
        while len(turns) < rounds * (start + 1) // starts:
            turns.append(run(engines, next(batches), tokens))
    return [summary(name, size, turns, colds) for name in DRAFTS]


def batches_of(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    place = 0
    while True:
        yield [prompts[(place + i) % len(prompts)] for i in range(size)]
        place += size


def fewest_steps(turns: dict[str, Turn]) -> int:
    return min(turn.steps for turn in turns.values())


def summary(
    name: str, size: int, turns: list[dict[str, Turn]], colds: list[dict[str, Turn]]
) -> dict[str, Any]:
    speeds = [speed([turn], name) for turn in turns]
    return {
        "batch": size,
        "mtp": name,
        "cpu_ms_per_token": statistics.median(
            1e3 * turn[name].together.cpu_s / turn[name].together.tokens for turn in turns
        ),
        "times_without": speed(turns, name),
        "times_without_median": statistics.median(speeds),
        "times_without_range": [min(speeds), max(speeds)],
        "times_without_to_the_end": speed(turns, name, lambda turn: turn.to_the_end),
        "times_without_cold": speed(colds, name),
        "tokens_per_step_and_sequence": statistics.median(
            turn[name].together.tokens / turn[name].steps / size for turn in turns
        ),
        "drafted_per_step": sum(turn[name].drafted for turn in turns)
        / sum(turn[name].steps for turn in turns),
        "accepted_of_drafted": sum(turn[name].accepted for turn in turns)
        / max(sum(turn[name].drafted for turn in turns), 1),
        "same_answers": all(
            turn[name].answers == turn["without"].answers for turn in (*turns, *colds)
        ),
    }


def speed(
    turns: list[dict[str, Turn]],
    name: str,
    part: Callable[[Turn], Decoded] = lambda turn: turn.together,
) -> float:
    """Tokens per CPU second as a multiple of those without drafts."""

    def tokens_per_s(engine: str) -> float:
        parts = [part(turn[engine]) for turn in turns]
        return sum(each.tokens for each in parts) / sum(each.cpu_s for each in parts)

    return tokens_per_s(name) / tokens_per_s("without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=32, help="turns of a lone sequence")
    parser.add_argument("--starts", type=int, default=4, help="times that engines are made anew")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = resolve(MODEL)
    encoder, stream = Encoder(checkpoint), Prompts("held-out", seed=2)
    count = 2 * args.rounds // SIZES[32][0] * 32 + 64 * args.starts
    prompts = [encoder.encode(stream[i], LONGEST_PROMPT) for i in range(count)]
    result: dict[str, Any] = {}
    for dtype in args.dtypes:
        models = Models(checkpoint, dtype)
        result[dtype] = []
        for size in args.batches:
            rounds, starts = (
                max(1, wanted // by)
                for wanted, by in zip((args.rounds, args.starts), SIZES[size], strict=True)
            )
            result[dtype] += case(models, prompts, size, args.tokens, rounds, starts)
    told = {"model": MODEL, "tokens": args.tokens, "rounds": args.rounds, "starts": args.starts}
    write(args.out, told | result)


if __name__ == "__main__":
    main()

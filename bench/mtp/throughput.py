"""What drafting is worth on a CPU: answers to held-out prompts by the engine, with and without, in turns.

    python bench/mtp/throughput.py --out bench/results/mtp_throughput.json

Every turn answers the same prompts, greedily and `--tokens` tokens each, without drafts and with 1, 2 and 3 at most, of
which the engine chooses the number itself; the engines take their steps in turns, so that whatever else the machine
does disturbs all of them. The prompts are of the stream on which the head was not trained. A ratio is taken within a
turn; medians of the turns are given. CPU seconds are those of the computing thread, from the first step that decodes to
the end. The answers are compared token by token.

An engine goes through all turns of its batch size, as that of a server does, after a warm-up of at least 100 steps. Its
very first answers, in which it finds out what rows cost, are given apart ("times_without_cold").
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.names import KeyedNamer
from headrace.frames import Sampling, Submit
from headrace.models import DType, Model, load_model
from headrace.models.source import resolve
from headrace.mtp_training.prompts import Prompts
from headrace.mtp_training.writer import Encoder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from report import write

BLOCK = 16
MODEL = "smollm2-r1"
DTYPES: tuple[DType, ...] = ("float32", "int8")
SIZES = {1: 1, 8: 2, 32: 4}  # of a batch, and by what the number of turns is divided
DRAFTS = (0, 1, 2, 3)
WARM_UP_STEPS = 100  # by which the engine knows what rows cost
LONGEST_PROMPT = 192


@dataclass(slots=True)
class Turn:
    """One run over all prompts of a batch."""

    cpu_s: float
    tokens: int
    drafted: int
    accepted: int
    steps: int
    answers: dict[int, list[int]]


def run(engines: dict[int, Engine], prompts: list[list[int]], tokens: int) -> dict[int, Turn]:
    """Answer all prompts at once with each engine: a step of one, then a step of the next."""
    turns: dict[int, Turn] = {}
    for drafts, engine in engines.items():
        for request, prompt in enumerate(prompts):
            packed = np.array(prompt, "<u4").tobytes()
            engine.submit(Submit(request, packed, Sampling(temperature=0.0), [], tokens))
        turns[drafts] = Turn(0.0, 0, 0, 0, 0, {request: [] for request in range(len(prompts))})
    while not all(engine.empty for engine in engines.values()):
        for drafts, engine in engines.items():
            if not engine.empty:
                step(engine, turns[drafts])
    return turns


def step(engine: Engine, turn: Turn) -> None:
    began = time.thread_time()
    result = engine.step()
    spent = time.thread_time() - began
    outputs = [output for answers in result.answers.values() for output in answers.outputs]
    for output in outputs:
        turn.answers[output.request] += output.ids
    if result.prefill_tokens == 0:
        turn.cpu_s += spent
        turn.steps += 1
        turn.tokens += sum(len(output.ids) for output in outputs)
        turn.drafted += sum(output.drafted for output in outputs)
        turn.accepted += sum(output.accepted for output in outputs)


def engine_of(model: Model, drafts: int, size: int, tokens: int) -> Engine:
    blocks = size * -(-(LONGEST_PROMPT + tokens + 8) // BLOCK)
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=size,
        max_batched_tokens=max(4 * size, 256),
        mtp=drafts,
    )
    return Engine(model, config, KeyedNamer(bytes(32), BLOCK), clock=time.thread_time)


def case(
    models: dict[int, Model], prompts: list[list[int]], size: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """One batch size: all numbers of drafts in turns, `rounds` times."""
    engines = {drafts: engine_of(models[drafts], drafts, size, tokens) for drafts in DRAFTS}

    def answer(turn: int) -> dict[int, Turn]:
        own = [prompts[(turn * size + i) % len(prompts)] for i in range(size)]
        return run(engines, own, tokens)

    cold = answer(rounds)
    steps, turn = min(first.steps for first in cold.values()), rounds
    while steps < WARM_UP_STEPS:
        turn += 1
        steps += min(more.steps for more in answer(turn).values())
    turns = [answer(turn) for turn in range(rounds)]
    return [
        {
            "batch": size,
            "mtp": drafts,
            "cpu_ms_per_token": statistics.median(
                1e3 * turn[drafts].cpu_s / turn[drafts].tokens for turn in turns
            ),
            "times_without": statistics.median(speed(turn, drafts) for turn in turns),
            "times_without_range": [
                min(speed(turn, drafts) for turn in turns),
                max(speed(turn, drafts) for turn in turns),
            ],
            "times_without_cold": speed(cold, drafts),
            "tokens_per_step_and_sequence": statistics.median(
                turn[drafts].tokens / turn[drafts].steps / size for turn in turns
            ),
            "accepted_of_drafted": sum(turn[drafts].accepted for turn in turns)
            / max(sum(turn[drafts].drafted for turn in turns), 1),
            "same_answers": all(turn[drafts].answers == turn[0].answers for turn in turns),
        }
        for drafts in DRAFTS
    ]


def speed(turn: dict[int, Turn], drafts: int) -> float:
    """Tokens per CPU second with drafts as a multiple of those without."""
    with_, without = turn[drafts], turn[0]
    return (with_.tokens / with_.cpu_s) / (without.tokens / without.cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of a lone sequence")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = resolve(MODEL)
    encoder, stream = Encoder(checkpoint), Prompts("held-out", seed=2)
    count = (args.rounds + 3) * max(SIZES)
    prompts = [encoder.encode(stream[i], LONGEST_PROMPT) for i in range(count)]
    result: dict[str, Any] = {}
    for dtype in args.dtypes:
        models = {  # each with a cache of its own
            drafts: load_model(
                checkpoint, dtype=dtype, device="cpu", block_tokens=BLOCK, mtp=drafts > 0
            )
            for drafts in DRAFTS
        }
        result[dtype] = [
            row
            for size in args.batches
            for row in case(models, prompts, size, args.tokens, max(1, args.rounds // SIZES[size]))
        ]
    write(args.out, {"model": MODEL, "tokens": args.tokens, "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()

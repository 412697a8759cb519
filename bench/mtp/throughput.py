"""What drafting is worth on a CPU: answers to held-out prompts by the engine, with and without, in turns.

    python bench/mtp/throughput.py --out bench/results/mtp_throughput.json

Every turn answers the same prompts, greedily and `--tokens` tokens each, without drafts and then with 1, 2 and 3 at
most, of which the engine chooses the number itself. The prompts are of the stream on which the head was not trained. A
ratio is taken within a turn; medians of the turns are given. CPU seconds are those of the computing thread, from the
first step that decodes to the end. The answers are compared token by token.
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
WARM_UP = 12  # tokens of an answer by which the engine knows what rows cost
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


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> Turn:
    """Answer all prompts at once."""
    for request, prompt in enumerate(prompts):
        packed = np.array(prompt, "<u4").tobytes()
        engine.submit(Submit(request, packed, Sampling(temperature=0.0), [], tokens))
    turn = Turn(0.0, 0, 0, 0, 0, {request: [] for request in range(len(prompts))})
    while not engine.empty:
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
    return turn


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
    models: dict[bool, Model], prompts: list[list[int]], size: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """One batch size: all numbers of drafts in turns, `rounds` times."""
    turns: dict[int, list[Turn]] = {drafts: [] for drafts in DRAFTS}
    for turn in range(rounds):
        own = [prompts[(turn * size + i) % len(prompts)] for i in range(size)]
        for drafts in DRAFTS:
            engine = engine_of(models[drafts > 0], drafts, size, tokens)
            run(engine, own, WARM_UP)
            turns[drafts].append(run(engine, own, tokens))
    rows: list[dict[str, Any]] = []
    for drafts, all_turns in turns.items():
        speeds = [
            (turn.tokens / turn.cpu_s) / (base.tokens / base.cpu_s)
            for turn, base in zip(all_turns, turns[0], strict=True)
        ]
        drafted = sum(turn.drafted for turn in all_turns)
        rows.append(
            {
                "batch": size,
                "mtp": drafts,
                "cpu_ms_per_token": statistics.median(
                    1e3 * turn.cpu_s / turn.tokens for turn in all_turns
                ),
                "times_without": statistics.median(speeds),
                "times_without_range": [min(speeds), max(speeds)],
                "tokens_per_step_and_sequence": statistics.median(
                    turn.tokens / turn.steps / size for turn in all_turns
                ),
                "accepted_of_drafted": sum(t.accepted for t in all_turns) / max(drafted, 1),
                "same_answers": all(
                    turn.answers == base.answers
                    for turn, base in zip(all_turns, turns[0], strict=True)
                ),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of a lone sequence")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = resolve(MODEL)
    encoder, stream = Encoder(checkpoint), Prompts("held-out", seed=2)
    prompts = [encoder.encode(stream[i], LONGEST_PROMPT) for i in range(args.rounds * max(SIZES))]
    result: dict[str, Any] = {}
    for dtype in DTYPES:
        models = {
            mtp: load_model(checkpoint, dtype=dtype, device="cpu", block_tokens=BLOCK, mtp=mtp)
            for mtp in (False, True)
        }
        result[dtype] = [
            row
            for size, fewer in SIZES.items()
            for row in case(models, prompts, size, args.tokens, max(1, args.rounds // fewer))
        ]
    write(args.out, {"model": MODEL, "tokens": args.tokens, "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()

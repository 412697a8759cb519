"""Steps of the engine with a model of the default model's shape and random weights: all that a request waits for.

    python -m bench.gpu.engine_steps --out engine.json [--dry] [--budget-s 45]

Each case decodes so many sequences, greedily or drawn, as a worker's engine does: plan, batch, forward pass, sampling,
bookkeeping, one step after the other. Beside the time of a step stand the work of the GPU in it, the CPU time of the
engine's thread, the steps of them that a recording did, and what both sides did in them, by the profiler.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.random_checkpoint import SMOLLM2_CONFIG, TINY_LLAMA_CONFIG, RandomCheckpoint
from bench.gpu.steps import Row, by_kernel
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.wire.frames import Sampling, Submit
from headrace_kernels.torch_ops import TRITON, TorchBackend

GREEDY = Sampling(temperature=0.0)
FIRST = 12  # steps before those that count: they compile, and are recorded
PROFILED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large it all is."""

    raw: dict[str, Any]  # config.json
    cases: tuple[tuple[int, bool], ...]  # sequences, and whether their tokens are drawn
    prompt: int  # tokens
    steps: int  # that count
    block_tokens: int
    dtype: str


FULL = Plan(
    raw=SMOLLM2_CONFIG,
    cases=((1, False), (1, True), (32, False), (32, True), (128, True)),
    prompt=204,
    steps=64,
    block_tokens=64,
    dtype="float32",
)
DRY = Plan(
    raw=TINY_LLAMA_CONFIG,
    cases=((1, False), (2, True)),
    prompt=5,
    steps=2,
    block_tokens=16,
    dtype="float32",
)


def case_name(sequences: int, *, drawn: bool) -> str:
    return f"{sequences} sequences, {'drawn' if drawn else 'greedy'}"


class Served:
    """An engine whose sequences never end."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        checkpoint = RandomCheckpoint(plan.raw, device)
        config = checkpoint.config
        self.backend = TorchBackend(
            attention_of(config, plan.block_tokens),
            dtype=plan.dtype,
            device=str(device),
            kernels=TRITON,
        )
        weights = load_weights(checkpoint, self.backend)
        self._model = Llama(config, weights, self.backend, plan.block_tokens)
        self._answer = FIRST + plan.steps + 3 * PROFILED
        self._most = max(sequences for sequences, _ in plan.cases)
        blocks = -(-(plan.prompt + self._answer + 1) // plan.block_tokens)
        self._blocks = self._most * blocks
        self._model.allocate_kv(self._blocks)
        self._model.record_steps()  # as workers do

    def decoding(self, sequences: int, *, drawn: bool) -> Engine:
        """An engine that has computed the prompts of so many sequences."""
        config = EngineConfig(
            num_blocks=self._blocks,
            block_tokens=self._plan.block_tokens,
            max_sequences=self._most,
            max_batched_tokens=8192,
            max_waiting=sequences,
        )
        hasher = KeyedBlockHasher(bytes(32), self._plan.block_tokens)
        engine = Engine(self._model, config, hasher)
        for request in range(sequences):
            random = np.random.default_rng(request)
            tokens = random.integers(3, self._model.vocab_size, self._plan.prompt)
            sampling = Sampling(temperature=1.0, seed=request) if drawn else GREEDY
            prompt = tokens.astype("<u4").tobytes()
            engine.submit(Submit(request, prompt, sampling, [], self._answer))
        while engine.waiting_tokens:
            engine.step()
        return engine

    def row(self, sequences: int, *, drawn: bool, dry: bool) -> Row:
        """What a step of so many takes."""
        engine = self.decoding(sequences, drawn=drawn)
        for _ in range(FIRST):
            tokens = sum(answers.num_tokens for answers in engine.step().answers.values())
            if tokens != sequences:
                raise RuntimeError(f"a step of {sequences} sequences gave {tokens} tokens")
        row: Row = {
            "step": case_name(sequences, drawn=drawn),
            "sequences": sequences,
            "drawn": drawn,
        }
        replayed = self._replayed
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(self._plan.steps):
            began, cpu_began = time.perf_counter(), time.thread_time()
            engine.step()
            cpu.append(time.thread_time() - cpu_began)
            wall.append(time.perf_counter() - began)
        row["recorded"] = self._replayed - replayed
        if dry:
            return row | {"dry": True}
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(PROFILED):
            engine.step()
        profile.disable()
        return row | {
            "steps": self._plan.steps,
            "p50_ms": statistics.median(wall) * 1e3,
            "mean_ms": statistics.fmean(wall) * 1e3,
            "p90_ms": statistics.quantiles(wall, n=10)[-1] * 1e3,
            "cpu_p50_ms": statistics.median(cpu) * 1e3,
            "kernels_of_a_step": by_kernel(engine.step),
            "python": _by_function(profile),
        }

    @property
    def _replayed(self) -> int:
        recordings = self.backend.recordings
        return 0 if recordings is None else recordings.replayed


def _by_function(profile: cProfile.Profile, most: int = 24) -> list[Row]:
    """Of one step, the functions that took longest themselves. The profiler makes calls slower than they are."""
    stats: Any = pstats.Stats(profile)
    rows: list[Row] = [
        {
            "name": f"{Path(file).name}:{line} {name}"[:80],
            "self_us": own / PROFILED * 1e6,
            "total_us": total / PROFILED * 1e6,
            "calls": calls / PROFILED,
        }
        for (file, line, name), (_, calls, own, total, _) in stats.stats.items()
    ]
    rows.sort(key=lambda row: -float(row["self_us"]))
    return rows[:most]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without times")
    parser.add_argument("--budget-s", type=float, default=45.0)
    args = parser.parse_args()
    end_at = time.monotonic() + args.budget_s
    plan, device = (DRY, "cpu") if args.dry else (FULL, "cuda")
    served = Served(plan, torch.device(device))
    rows: list[Row] = []
    report: Row = {"model": "SmolLM2-135M's shape, random weights", "dtype": plan.dtype}
    report |= {"prompt_tokens": plan.prompt, "steps": rows}
    for sequences, drawn in plan.cases:
        if time.monotonic() < end_at:
            rows.append(_row(served, sequences, drawn=drawn, dry=args.dry))
        else:
            left_out = "the budget was spent"
            rows.append({"step": case_name(sequences, drawn=drawn), "left_out": left_out})
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


def _row(served: Served, sequences: int, *, drawn: bool, dry: bool) -> Row:
    """Of a case, or why there is none."""
    try:
        return served.row(sequences, drawn=drawn, dry=dry)
    except Exception as error:
        name, says = case_name(sequences, drawn=drawn), f"{type(error).__name__}: {error}"
        print(f"failed: {name}: {says.splitlines()[0]}")
        return {"step": name, "failed": says.splitlines()[0]}


if __name__ == "__main__":
    sys.exit(main())

"""Tokens a second of two expert-parallel ranks beside two workers that each hold the whole model, and beside one.

    python -m bench.ranks.throughput --out bench/results/ranks_throughput.json

All answer the same number of sequences (`--sequences`), greedily: ranks and the two workers half of them each. Every
process has one thread; those that have no turn wait. What counts are the steps from when all prompts of a turn are
computed until the first answer ends, so no step is a prompt's and no sequence is missing. The turns of the three
alternate, so that what else the machine does meets all of them; ratios are of one turn, their median and range of all.
A fourth kind is the two ranks joined by gloo instead of shared memory. The answers are compared token by token.

Bytes of experts are those of their weights in memory. Routers and clients take no part: `headrace bench load` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from bench.helpers.report import write
from headrace.engine.engine import Engine
from headrace.wire.frames import Sampling, Submit

KINDS = ("ranks", "ranks-gloo", "workers", "one")
PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Window:
    """Of one process and turn: when its steps ended, and how many tokens they brought."""

    ends_s: list[float]
    tokens: list[int]
    full_from: int  # the step from which all sequences answer
    full_until: int  # and the one in which the first ends


class Process:
    """A rank or a worker, told what to do line by line."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.ranks.throughput", *argv],
            env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, what: Any) -> None:
        stdin = cast("IO[str]", self._process.stdin)
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()

    def hear(self) -> Any:
        line = cast("IO[str]", self._process.stdout).readline()
        if not line:
            raise RuntimeError("a process ended; its last lines are above")
        return json.loads(line)

    def end(self) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait(60)


def child(args: argparse.Namespace) -> None:
    """Answer turn after turn."""
    from headrace.settings.worker import WorkerSettings
    from headrace.worker.load_model import load
    from headrace.worker.parallel.environment import read_environment

    torch.set_num_threads(1)
    settings = WorkerSettings(
        model=args.model,
        routers=("127.0.0.1:1",),  # nobody dials
        ep_transport="gloo" if args.child == "ranks-gloo" else "auto",
        kv_memory_bytes=256 << 20,
        log_level="warning",
    )
    loaded = load(settings, read_environment(os.environ))
    tell({"ready": True})
    for line in sys.stdin:
        told = json.loads(line)
        tell(turn(loaded.engine, told["sequences"], told["tokens"], told["seed"]))
    if loaded.group is not None:
        loaded.group.close()


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


def turn(engine: Engine, sequences: list[int], tokens: int, seed: int) -> dict[str, Any]:
    """Answer these sequences; those of one number have the same prompt wherever they are answered."""
    answers: dict[int, list[int]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        draw = np.random.default_rng([seed, sequence])
        prompt = draw.integers(100, 30_000, PROMPT_TOKENS).astype("<u4").tobytes()
        engine.submit(Submit(sequence, prompt, Sampling(temperature=0.0), [], tokens))
    ends_s: list[float] = []
    counts: list[int] = []
    full_from = full_until = -1
    cpu_s = time.process_time()
    rounds = engine.rounds
    while not engine.empty or (rounds is not None and rounds.due):
        result = engine.step()
        outputs = [output for of_link in result.answers.values() for output in of_link.outputs]
        for output in outputs:
            answers[output.request].extend(output.ids)
        if not outputs:
            continue
        ends_s.append(time.monotonic())
        counts.append(sum(len(output.ids) for output in outputs))
        if full_from < 0 and all(answers.values()):
            full_from = len(ends_s) - 1
        if full_until < 0 and any(output.finish is not None for output in outputs):
            full_until = len(ends_s) - 1
    return {
        "ends_s": ends_s,
        "tokens": counts,
        "full_from": full_from,
        "full_until": full_until,
        "cpu_s": time.process_time() - cpu_s,
        "answers": {str(sequence): answer for sequence, answer in answers.items()},
    }


def tokens_per_s(windows: list[Window]) -> float:
    """Of all processes, while all of them have all their sequences."""
    begin_s = max(window.ends_s[window.full_from] for window in windows)
    end_s = min(window.ends_s[window.full_until] for window in windows)
    assert end_s > begin_s, "the processes did not answer at the same time: give more --tokens"
    tokens = sum(
        count
        for window in windows
        for at_s, count in zip(window.ends_s, window.tokens, strict=True)
        if begin_s < at_s <= end_s
    )
    return tokens / (end_s - begin_s)


def start(kind: str, model: str) -> list[Process]:
    argv = ["--child", kind, "--model", model]
    if kind == "one":
        return [Process(argv, {})]
    if kind == "workers":
        return [Process(argv, {}) for _ in range(2)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"throughput-{secrets.token_hex(4)}",
    }
    return [Process(argv, common | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]


def run_turn(processes: list[Process], sequences: int, tokens: int, seed: int) -> dict[str, Any]:
    for place, process in enumerate(processes):
        own = list(range(place, sequences, len(processes)))
        process.say({"sequences": own, "tokens": tokens, "seed": seed})
    heard = [process.hear() for process in processes]
    windows = [
        Window(one["ends_s"], one["tokens"], one["full_from"], one["full_until"]) for one in heard
    ]
    return {
        "tokens_per_s": tokens_per_s(windows),
        "cpu_s": sum(one["cpu_s"] for one in heard),
        "answers": {name: ids for one in heard for name, ids in one["answers"].items()},
    }


def compare(turns: list[dict[str, dict[str, Any]]], kind: str, with_kind: str) -> dict[str, Any]:
    ratios = [t[kind]["tokens_per_s"] / t[with_kind]["tokens_per_s"] for t in turns]
    return {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Two ranks beside two workers and one")
    parser.add_argument("--model", default="smollm2-r1")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    running = {kind: start(kind, args.model) for kind in KINDS}
    for processes in running.values():
        for process in processes:
            process.hear()
    turns: list[dict[str, dict[str, Any]]] = []
    for seed in range(args.turns + 1):
        turns.append(
            {
                kind: run_turn(processes, args.sequences, args.tokens, seed)
                for kind, processes in running.items()
            }
        )
        print({kind: round(one["tokens_per_s"], 1) for kind, one in turns[-1].items()}, flush=True)
    for processes in running.values():
        for process in processes:
            process.end()
    turns = turns[1:]  # the first turn warms up
    same = all(t[kind]["answers"] == t["one"]["answers"] for t in turns for kind in KINDS)
    write(
        args.out,
        {
            "model": args.model,
            "sequences": args.sequences,
            "tokens_each": args.tokens,
            "turns": args.turns,
            "tokens_per_s": {
                kind: statistics.median(t[kind]["tokens_per_s"] for t in turns) for kind in KINDS
            },
            "cpu_s": {kind: statistics.median(t[kind]["cpu_s"] for t in turns) for kind in KINDS},
            "ranks_over_two_workers": compare(turns, "ranks", "workers"),
            "ranks_over_one_worker": compare(turns, "ranks", "one"),
            "ranks_over_ranks_by_gloo": compare(turns, "ranks", "ranks-gloo"),
            "same_tokens": same,
        },
    )


if __name__ == "__main__":
    main()

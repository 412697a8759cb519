"""Servers on one machine, compared in turns: A B A B ..., so that a drifting machine drifts for all.

Start each server first and name it with its address, process and model:

    .venv/bin/python -m bench.serving.paired --server headrace=127.0.0.1:8000,PID,MODEL \\
        --server vllm=127.0.0.1:8191,PID,MODEL --out bench/results/serving_paired.json

Every server gets the same prompts (greedy, stop tokens ignored); no two runs share a prompt, so no
cache of an earlier run helps. CPU seconds are those of the process and all its
descendants. The client is `headrace bench load`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bench.helpers.report import write


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a process and its descendants."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def one_run(server: str, concurrency: int, run: int, args: argparse.Namespace) -> dict[str, float]:
    """One load run against one server."""
    address, pid, model = server.split(",", 2)
    requests = max(args.min_requests, concurrency)
    before = tree_cpu_s(int(pid))
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "bench", "load", "--json", "-", "--target", address, "--model", model,
         "-n", str(requests), "-c", str(concurrency),
         "--prompt-words", str(args.prompt_words), "--max-tokens", str(args.max_tokens), "--timeout-s", "300",
         "--first", str((args.seed * 100 + run) * 1_000_000 + concurrency * 1000)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    if result["errors"]:
        raise RuntimeError(f"{server}: {result['error_samples']}")
    cpu_s = tree_cpu_s(int(pid)) - before
    return {
        "tokens_per_s": result["tokens_per_s"],
        "cpu_s_per_1000_tokens": cpu_s / result["completion_tokens"] * 1e3,
        "cores": cpu_s / result["wall_s"],
        "ttft_p50_ms": result["ttft_ms"]["p50"],
        "gap_p50_ms": result["itl_ms"]["p50"],
        "prompt_tokens_per_request": result["prompt_tokens"] / result["requests"],
    }


def main() -> None:
    """Run all servers in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--server", action="append", required=True, metavar="NAME=HOST:PORT,PID,MODEL"
    )
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument(
        "--prompt-words", type=int, default=110, help="words in each prompt, about 128 tokens"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--min-requests", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="other seeds are other prompts")
    parser.add_argument(
        "--note", action="append", default=[], help="kept in the result: versions, threads"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    servers = dict(server.split("=", 1) for server in args.server)
    figures: dict[str, Any] = {"notes": args.note}
    for concurrency in map(int, args.concurrency.split(",")):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for run in range(args.runs):
            for name, server in servers.items():
                runs[name].append(one_run(server, concurrency, run, args))
        medians = {
            name: {key: round(statistics.median(run[key] for run in kept), 3) for key in kept[0]}
            for name, kept in runs.items()
        }
        figures[f"concurrency_{concurrency}"] = {"median": medians, "runs": runs}
    write(args.out, figures)


if __name__ == "__main__":
    main()

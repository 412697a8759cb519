"""Time to the first token at concurrency 1: split serving against one worker that does both, live on mock workers.

    .venv/bin/python -m bench.disagg.ttft --out bench/results/split_ttft.json

A real router and the step times of DeepSeek-R1 on an H200, without noise. Each round is one run of each side, in turn;
a prompt is sent once. What splitting adds to the first token is what the router does for a second leg, since the KV
moves while the prompt is computed and the first token does not wait for it.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.helpers.fleet import fleet
from bench.helpers.report import ROOT, rounded, write

SIDES = {"aggregated": ["--workers", "1"], "split": ["--prefill", "1", "--decode", "1"]}
ALLOWED_MS = 2.0


def run(args: argparse.Namespace, side: str, first: int) -> dict[str, Any]:
    """One run of one side, as `headrace-bench load` reports it."""
    bench = args.bin / "headrace-bench"
    # a prompt never goes to the decode worker whole: this is about pairs
    router = [args.bin / "headrace-router", "--policy", "round-robin"]
    mock = [bench, "mock", "--preset", "h200", "--noise", "0"]
    flags = SIDES[side]
    with fleet(router, mock, len(flags) // 2, flags) as (running, folder):
        out = folder / "report.json"
        load = [
            bench, "load", "--target", running.address, "--concurrency", "1",
            "--requests", str(args.requests), "--prompt-tokens", str(args.prompt_tokens),
            "--max-tokens", str(args.max_tokens), "--first", str(first), "--json", out,
        ]  # fmt: skip
        running.run(load, folder, 300)
        report: dict[str, Any] = json.loads(out.read_text())
    if report["errors"]:
        raise SystemExit(f"{side}: {report['errors_by_kind']}")
    return {name: report[name] for name in ("ttft_ms", "tpot_quantiles_ms", "itl_ms", "e2e_ms")}


def main() -> int:
    """Run both sides in turn; 1 if the split one is more than `ALLOWED_MS` later."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="of a run")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in SIDES:
            runs[side].append(run(args, side, number * args.requests))
    p50 = {side: statistics.median(r["ttft_ms"]["p50"] for r in runs[side]) for side in SIDES}
    added_ms = p50["split"] - p50["aggregated"]
    figures = {
        "preset": "h200", "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens,
        "requests_per_run": args.requests, "ttft_p50_ms": p50, "split_adds_ms": added_ms,
        "allowed_ms": ALLOWED_MS, "runs": runs,
    }  # fmt: skip
    write(args.out, rounded(figures))
    return int(added_ms > ALLOWED_MS)


if __name__ == "__main__":
    sys.exit(main())

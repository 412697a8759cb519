"""How far the router's predictions of time to first token are off: the simulator over traces and loads, with what the
router learns of the workers alone (`--step-prior` of `headrace sim` gives it their exact costs).

    .venv/bin/python -m bench.routing.predictions --out bench/results/routing_predictions.json

A prediction says when the first token comes if nobody else is placed on that worker before; what later arrivals add
cannot be known then. So each error is given at three moments: at the placement; once all that came in the same moment
are placed, too; and with all that were placed until the first token came. The errors at the placement of the requests
after which nobody came are given apart. `--print FILE` prints the rows of docs/benchmarks.md from a result file.
"""

import argparse
import json
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.helpers.report import ROOT, commit, machine, rounded
from bench.routing.run import Bench, Report

CASES = {
    "mooncake_conversation_0-40min.jsonl.gz": [0.3, 0.6, 0.85, 0.95],
    "mooncake_synthetic_first65pct.jsonl.gz": [0.6, 0.9],
    "agentic_coding_13conv.blocks16.jsonl.gz": [0.6, 0.9, 1.5],
    "tau_airline_tasks0-32.blocks16.jsonl.gz": [1.5, 4.0],
}
TITLES = {
    "mooncake_conversation_0-40min": "Mooncake conversation",
    "mooncake_synthetic_first65pct": "Mooncake synthetic",
    "agentic_coding_13conv.blocks16": "agentic coding",
    "tau_airline_tasks0-32.blocks16": "tau airline",
}
ERROR = "ttft_prediction_error"
MOMENTS = (ERROR, f"{ERROR}_settled", f"{ERROR}_last", f"{ERROR}_undisturbed")
KEPT = ("trace", "ttft_ms", "tpot_ms", "e2e_ms", "token_hit_rate", *MOMENTS)
HEAD = (
    "| trace, load | mean TTFT, ms (seeds) | placement: p50 | mean | p90 | p99 "
    "| settled: p50 | mean | p90 | p99 | last: p50 | p90 | alone: share | p50 | p90 | p99 |"
)


def middle(bench: Bench, file: Path, util: float, flags: list[str], seeds: int) -> Report:
    """The middle one of some simulations, by its mean time to the first token, and all means."""
    runs = [
        bench.sim(file, "kv", "--util", str(util), "--seed", str(seed), *flags)
        for seed in range(seeds)
    ]
    runs.sort(key=lambda run: run["ttft_ms"]["mean"])
    report: Report = {key: runs[seeds // 2][key] for key in KEPT}
    means = [run["ttft_ms"]["mean"] for run in runs]
    return report | {"util": util, "flags": flags, "ttft_mean_ms_by_seed": means}


def row(report: Report) -> str:
    """A line of the table in docs/benchmarks.md."""
    off, settled, last, alone = (report[moment] for moment in MOMENTS)
    means = report["ttft_mean_ms_by_seed"]
    cells = [
        f"{TITLES.get(report['trace'], report['trace'])}, {report['util']:g}",
        f"{report['ttft_ms']['mean']:,.0f} ({min(means):,.0f} to {max(means):,.0f})",
        *(percent(off[figure]) for figure in ("p50", "mean", "p90", "p99")),
        *(percent(settled[figure]) for figure in ("p50", "mean", "p90", "p99")),
        *(percent(last[figure]) for figure in ("p50", "p90")),
        percent(alone["count"] / off["count"]),
        *(percent(alone[figure]) for figure in ("p50", "p90", "p99")),
    ]
    return f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    """Two digits of it."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def table(reports: list[Report]) -> str:
    """All rows, with their head."""
    ruler = "|" + "---|" * (HEAD.count("|") - 1)
    return "\n".join([HEAD, ruler, *map(row, reports)])


def main() -> int:
    """Simulate all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of each worker")
    parser.add_argument("--block-tokens", type=int)
    parser.add_argument("--preset", default="h200")
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--flags", default="", help="more flags of headrace sim")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/routing_predictions.json")
    parser.add_argument("--print", type=Path, metavar="FILE", help="only print a result file")
    args = parser.parse_args()
    if args.print is not None:
        print(table(json.loads(args.print.read_text())))
        return 0
    bench = Bench(args)
    origin = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.routing.predictions", *sys.argv[1:]]),
    }
    setting = {"workers": args.workers, "blocks": args.blocks, "preset": args.preset}
    flags = shlex.split(args.flags)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [
            pool.submit(middle, bench, ROOT / "bench/traces" / name, util, flags, args.seeds)
            for name, utils in CASES.items()
            for util in utils
        ]
        reports: list[Report] = [future.result() | setting | origin for future in pending]
    print(table(reports))
    text = ",\n".join(json.dumps(rounded(report), separators=(",", ":")) for report in reports)
    args.out.write_text(f"[\n{text}\n]\n")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Over which loads KV-aware routing pays, and against what: the simulator over a range of them.

    .venv/bin/python -m bench.routing.load_range --out bench/results/routing_load.json

For each load and policy, `headrace-bench sim` of the whole trace; a load is the share of the fleet's time that
computing every prompt whole would take. The table gives each policy's time to first token over that of `kv`.
"""

import argparse
import os
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.helpers.report import ROOT, commit, machine
from bench.routing.run import POLICIES, Bench, write
from bench.routing.table import Report

HEADLINE = 20  # the ratio to round-robin that the field claims
# A policy whose first tokens take so much longer in the second half of the trace, and so long at all, falls behind.
GROWS, LONG_MS = 2.0, 2000.0


def ratio(report: Report, kv: Report, figure: str) -> float:
    """How many times as long the first token takes."""
    return report["ttft_ms"][figure] / kv["ttft_ms"][figure]


def mark(report: Report) -> str:
    """A star where the policy could not keep up: its queues grow, and times say how long the trace is."""
    means = [part["ttft_mean_ms"] for part in report["hit_rate_over_time"]]
    half = len(means) // 2
    first, second = statistics.fmean(means[:half]), statistics.fmean(means[half:])
    return "*" if second > LONG_MS and second > GROWS * first else " "


def table(name: str, reports: list[Report]) -> str:
    """One line for each load, and where round-robin takes `HEADLINE` times as long."""
    others = [policy for policy in POLICIES if policy != "kv"]
    lines = [
        "",
        name,
        "  load   kv ms, mean   p50" + "".join(f"{p + ' mean':>20}{'p50':>8}" for p in others),
    ]
    by_run = {(report["util"], report["policy"]): report for report in reports}
    loads = sorted({report["util"] for report in reports})
    for load in loads:
        kv = by_run[load, "kv"]
        cells = "".join(
            f"{ratio(by_run[load, other], kv, 'mean'):>18.1f}x{mark(by_run[load, other])}"
            f"{ratio(by_run[load, other], kv, 'p50'):>7.1f}x"
            for other in others
        )
        lines.append(
            f"{load:>6g}{kv['ttft_ms']['mean']:>11.0f}{mark(kv)}{kv['ttft_ms']['p50']:>8.0f}{cells}"
        )
    for figure in ("mean", "p50"):
        far = [
            load
            for load in loads
            if ratio(by_run[load, "round-robin"], by_run[load, "kv"], figure) >= HEADLINE
        ]
        where = f"at loads {', '.join(f'{load:g}' for load in far)}" if far else "at no load"
        lines.append(f"  round-robin's {figure} is {HEADLINE} times that of kv or more {where}")
    lines.append(
        "  * could not keep up with the requests: its times grow with the length of the trace"
    )
    return "\n".join(lines)


def main() -> int:
    """Simulate all loads; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--loads", default="0.3,0.6,0.9,1.2,1.5,2,3,4")
    parser.add_argument(
        "--blocks", default="2000,8000", help="KV blocks of each worker, a run each"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--block-tokens", type=int)
    parser.add_argument("--preset", default="h200")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/routing_load.json")
    args = parser.parse_args()
    traces: list[Path] = args.traces or sorted((ROOT / "bench/traces").glob("*.blocks16.jsonl.gz"))
    origin = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.routing.load_range", *sys.argv[1:]]),
    }
    loads = [float(load) for load in args.loads.split(",")]
    everything: list[Report] = []
    for trace in traces:
        for blocks in map(int, args.blocks.split(",")):
            bench = Bench(argparse.Namespace(**vars(args) | {"blocks": blocks}))

            def one(load: float, policy: str, bench: Bench = bench, trace: Path = trace) -> Report:
                slo = ["--slo", "ttft=2s,tpot=80ms"]  # MLPerf's limits for DeepSeek-R1, Server
                return bench.sim(trace, policy, "--util", str(load), *slo)

            runs = [(load, policy) for load in loads for policy in POLICIES]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                pending = [pool.submit(one, load, policy) for load, policy in runs]
                done = [future.result() for future in pending]
            setting = {"workers": args.workers, "blocks": blocks, "preset": args.preset}
            name = f"{done[0]['trace']}, {blocks} blocks a worker"
            reports = [
                report | setting | origin | {"trace": name, "util": load}
                for report, (load, _) in zip(done, runs, strict=True)
            ]
            print(table(name, reports))
            for report in reports:
                for curve in ("ttft_curve_ms", "tpot_curve_ms", "hit_rate_over_time"):
                    report.pop(curve, None)  # too many runs for a curve each
            everything += reports
    for picture in write(everything, args.out):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

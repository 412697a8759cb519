"""Placement over the ranks of one expert-parallel group: `kv` against round-robin, which takes ranks for workers.

    python -m bench.routing.groups [TRACES...] [--ranks 4] [--util 0.6,1.5] [--out FILE.json]

A group's step lasts as long as the longest of its ranks, so that all wait for what one of them computes. For each trace
and load the whole trace is simulated under both policies, with several seeds. Its first part also runs live, through
a router and a mock group, where `/workers` says how uneven the ranks were. Blocks of 16 tokens (the agentic and the tau
trace) are served as they are.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.helpers.fleet import ProcessDiedError
from bench.helpers.report import ROOT, commit, machine, rounded
from bench.routing.run import SEEDS, Bench, Case, Report

POLICIES = ["round-robin", "kv"]
TRACES = ["agentic_coding_13conv.blocks16.jsonl.gz", "tau_airline_tasks0-32.blocks16.jsonl.gz"]
HEAD = (
    f"{'':22}{'hits %':>8}{'TTFT mean':>11}{'p50':>8}{'p99':>9}{'per token':>11}{'tokens/s':>10}"
    f"{'step skew':>11}{'waited %':>10}"
)


class GroupBench(Bench):
    """The same with all workers in one group."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.fleet_flags = ["--ep", str(args.workers)]

    def live_limit_s(self, case: Case) -> float:  # noqa: ARG002
        return self.args.live_limit_s

    def seen(self, address: str) -> Report:
        with urllib.request.urlopen(f"http://{address}/workers", timeout=10) as answer:
            group = json.load(answer)["groups"][0]
        return {
            "groups": {
                "step_skew": group[
                    "step_skew"
                ],  # of late, and not over the whole run as in a simulation
                "waited_share": group["waited_share"],
                "tokens_by_rank": [rank["tokens"] for rank in group["ranks"]],
            }
        }

    def whole(self, file: Path, policy: str, util: float) -> Report:
        """The middle one of some simulations of the whole trace."""
        runs = [
            self.sim(file, policy, "--util", str(util), "--seed", str(seed))
            for seed in range(SEEDS)
        ]
        runs.sort(key=lambda run: run["ttft_ms"]["mean"])
        means = {
            "ttft_mean_ms_by_seed": [run["ttft_ms"]["mean"] for run in runs],
            "step_skew_by_seed": [run["groups"]["step_skew"] for run in runs],
        }
        return runs[SEEDS // 2] | means


def summary(report: Report) -> Report:
    """What is kept: figures, no curves."""
    kept = (
        "trace", "policy", "mode", "requests", "errors", "wall_s", "completion_tokens", "token_hit_rate",
        "bound_hit_rate", "ttft_ms", "tpot_ms", "e2e_ms", "imbalance", "groups", "ttft_mean_ms_by_seed",
        "step_skew_by_seed", "ttft_prediction_error", "speed",
    )  # fmt: skip
    found = {key: report[key] for key in kept if report.get(key) is not None}
    return found | {"tokens_per_s": report["completion_tokens"] / report["wall_s"]}


def table(reports: list[Report]) -> str:
    """A block for each trace and load."""
    lines: list[str] = []
    for trace, util in dict.fromkeys((r["trace"], r["util"]) for r in reports):
        lines += ["", f"{trace}, util {util:g}", HEAD]
        for report in reports:
            if (report["trace"], report["util"]) != (trace, util):
                continue
            ttft, groups = report["ttft_ms"], report["groups"]
            lines.append(
                f"  {report['policy']:13}{report['mode']:7}{100 * report['token_hit_rate']:>8.1f}"
                f"{ttft['mean']:>11.0f}{ttft['p50']:>8.0f}{ttft['p99']:>9.0f}{report['tpot_ms'] or 0:>11.1f}"
                f"{report['tokens_per_s']:>10.0f}{groups['step_skew']:>11.2f}{100 * groups['waited_share']:>10.1f}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, help="files; agentic and tau if none")
    parser.add_argument("--ranks", dest="workers", type=int, default=4, help="of the one group")
    parser.add_argument("--blocks", type=int, default=8000, help="KV blocks of each rank")
    parser.add_argument("--block-tokens", type=int, help="of the traces; found out if left out")
    parser.add_argument("--preset", default="h200", help="whose step costs the ranks have")
    parser.add_argument(
        "--util", default="0.6,1.5", help="shares of the group's time that all prompts would take"
    )
    parser.add_argument("--live-s", type=float, default=15, help="for each live run; 0 for none")
    parser.add_argument(
        "--live-limit-s", type=float, default=120, help="after which a live run is given up"
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/routing_groups.json")
    args = parser.parse_args()
    utils = [float(util) for util in args.util.split(",")]
    traces: list[Path] = args.traces or [ROOT / "bench/traces" / name for name in TRACES]
    bench = GroupBench(args)
    origin = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.routing.groups", *sys.argv[1:]]),
    }
    reports: list[Report] = []

    def keep(report: Report, util: float, **setting: object) -> None:
        if report["errors"]:
            print(f"  {report['errors']} errors: {report['errors_by_kind']}", file=sys.stderr)
        fixed = {"ranks": args.workers, "blocks": args.blocks, "preset": args.preset, "util": util}
        reports.append(summary(report) | fixed | setting | origin)

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            runs = [
                (trace, util, policy) for trace in traces for util in utils for policy in POLICIES
            ]
            simulated = [
                pool.submit(bench.whole, trace, policy, util) for trace, util, policy in runs
            ]
            for (_, util, _), done in zip(runs, simulated, strict=True):
                keep(done.result(), util)
        for trace in traces if args.live_s else []:
            args.util = utils[0]
            case: Case = bench.case(trace, args.live_s)
            for policy in POLICIES:
                print(f"live: {case.name}, {policy}", file=sys.stderr, flush=True)
                live = {"mock_speed": case.mock_speed, "scale": case.scale, "until_s": case.until_s}
                keep(bench.live(case, policy), utils[0], **live)
    except ProcessDiedError as error:
        print(f"groups: {error}", file=sys.stderr)
        return 1
    print(table(reports))
    for util in utils:
        gain = [
            robin["ttft_ms"]["mean"] / kv["ttft_ms"]["mean"]
            for robin in reports
            for kv in reports
            if (robin["policy"], kv["policy"]) == ("round-robin", "kv")
            and robin["util"] == kv["util"] == util
            and (robin["trace"], robin["mode"]) == (kv["trace"], kv["mode"])
        ]
        print(f"util {util:g}: first tokens under kv are {statistics.mean(gain):.1f} times as soon")
    text = ",\n".join(json.dumps(rounded(report), separators=(",", ":")) for report in reports)
    args.out.write_text(f"[\n{text}\n]\n")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Routing policies on traces: a real router with a mock fleet, live and simulated, in one table.

    make bench-routing                                     the four traces of bench/traces, all policies
    make bench-routing TRACES="FILE..." POLICIES="kv,least-loaded" WORKERS=8 BLOCKS=2000 OUT=FILE.json

For each trace and policy: `headrace-router` and `headrace-bench mock` as processes, the trace replayed through
HTTP, and `headrace-bench sim` of the same requests. The fleet's clock runs up to 30 times as fast as ours
(--mock-speed); where the whole trace would still take too long, the live run and its simulation take the first
part of it, and the whole trace is simulated beside that, as `... (whole)`. Blocks of 512 tokens become blocks of
16 whose tokens cost what 32 do; answers shrink likewise (--scale).

Requests go out at the speed at which computing every prompt whole would take a chosen share of the fleet's time
(--util): 0.6, or 1.5 where more than 80 % of the prompt tokens could come from a cache, since there 0.6 is idle.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.helpers.fleet import ProcessDiedError, fleet
from bench.helpers.report import ROOT, commit, machine, rounded
from bench.routing.table import Report, table
from headrace.cli import plot

POLICIES = ["round-robin", "least-loaded", "power-of-two", "session-hash", "kv"]
WIRE_BLOCK_TOKENS = 16
# The most that two cores keep up with: a step of 19 ms takes 0.6 ms. Prompts that are not scaled down are up to
# 100 kB of JSON, and at 30 its reading would count 30-fold.
MOCK_SPEED = {True: 30.0, False: 8.0}
UTIL, REUSING_UTIL, REUSING = 0.6, 1.5, 0.8
PATIENCE_MS = 3_600_000  # nobody gives up: an overloaded policy shows as time, not as errors
LEAST_LIVE_S = 8.0
# Requests of one moment reach a router in any order, and with a few hundred requests that moves a mean by 10 % and
# more: of so many simulations of a live run's requests the middle one is kept, and all means.
SEEDS = 5


@dataclass(slots=True, kw_only=True)
class Case:
    """One trace and how it is run. Times of the trace are in seconds, as recorded."""

    file: Path
    name: str
    span_s: float
    block_tokens: int
    scale: int
    util: float
    speed: float
    mock_speed: float
    until_s: float
    worker_queue_ms: float = 0.0  # the router's default

    @property
    def is_whole(self) -> bool:
        """The live run takes all of the trace."""
        return self.until_s > self.span_s


class Bench:
    """The programs and the fleet that all cases share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.bench = args.bin / "headrace-bench"
        self.router = args.bin / "headrace-router"
        self.fleet_flags: list[str] = []  # of mock and simulation

    def json(self, *command: str | Path) -> Report:
        """What a command of headrace-bench writes with --json. Raises ProcessDiedError."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            done = subprocess.run(
                [self.bench, *command, "--json", file], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise ProcessDiedError(f"{command[0]} {command[1]}: {done.stderr.strip()}")
            return json.loads(file.read_text())

    def sim(self, file: Path, policy: str, *extra: str) -> Report:
        """Simulate at full scale."""
        return self.json(
            "sim", file, "--policy", policy, "--workers", str(self.args.workers),
            "--preset", self.args.preset, "--blocks", str(self.args.blocks),
            "--queue-timeout-ms", str(PATIENCE_MS), *self.block_tokens(), *self.fleet_flags, *extra,
        )  # fmt: skip

    def block_tokens(self) -> list[str]:
        """The flag that names the trace's block size, if it was given."""
        given = self.args.block_tokens
        return ["--block-tokens", str(given)] if given else []

    def case(self, file: Path, live_s: float) -> Case:
        """Find out what a trace holds and how it must run."""
        done = subprocess.run(
            [self.bench, "trace", file, *self.block_tokens()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())
        stats = json.loads(done.stdout)
        block_tokens: int = stats["block_tokens"]
        scale = max(block_tokens // WIRE_BLOCK_TOKENS, 1)
        if block_tokens % scale:
            scale = 1
        reusing = stats["ideal_hit_rate"] > REUSING
        util = self.args.util or (REUSING_UTIL if reusing else UTIL)
        case = Case(
            file=file, name=stats["trace"], span_s=stats["span_s"], block_tokens=block_tokens,
            scale=scale, util=util, speed=1.0, mock_speed=1.0, until_s=0.0,
        )  # fmt: skip
        usual = self.sim(file, "round-robin", "--util", str(util))
        case.speed, case.worker_queue_ms = usual["speed"], usual["router_ms"]["worker_queue"]
        fleet_s = case.span_s / case.speed
        case.mock_speed = min(max(round(fleet_s / live_s, 1), 1.0), MOCK_SPEED[scale > 1])
        case.until_s = round(live_s * case.mock_speed * case.speed, 3) + 1e-3
        return case

    def live(self, case: Case, policy: str) -> Report:
        """Replay through a real router. Raises ProcessDiedError."""
        args = self.args
        router: list[str | Path] = [
            self.router, "--policy", policy,
            # the default, on the mock's clock
            "--worker-queue-ms", str(max(round(case.worker_queue_ms / case.mock_speed), 1)),
            "--queue-timeout-ms", str(PATIENCE_MS), "--first-token-timeout-ms", str(PATIENCE_MS),
        ]  # fmt: skip
        mock: list[str | Path] = [
            self.bench, "mock", "--preset", args.preset, "--blocks", str(args.blocks),
            "--block-tokens", str(case.block_tokens // case.scale), "--token-scale", str(case.scale),
            "--accepted", str(1 / case.scale), "--speed", str(case.mock_speed), *self.fleet_flags,
        ]  # fmt: skip
        limit_s = self.live_limit_s(case)
        with fleet(router, mock, args.workers) as (running, folder):
            out = folder / "report.json"
            replay: list[str | Path] = [
                self.bench, "replay", case.file, "--target", running.address, "--json", out,
                "--until", str(case.until_s), "--speed", str(case.speed),
                "--mock-speed", str(case.mock_speed), "--mock-tokens", str(case.scale),
                "--scale", str(case.scale), "--output-scale", str(case.scale),
                "--policy", policy, "--workers", str(args.workers), "--blocks", str(args.blocks),
                "--timeout-s", str(int(limit_s)), *self.block_tokens(),
            ]  # fmt: skip
            running.run(replay, folder, limit_s)
            return json.loads(out.read_text()) | self.seen(running.address)

    def live_limit_s(self, case: Case) -> float:
        """What a replay may take until it is given up, of our time: a policy that cannot keep up takes longer."""
        return 60 + 20 * case.until_s / case.speed / case.mock_speed

    def seen(self, address: str) -> Report:  # noqa: ARG002
        """What a live run's router says at its end that belongs into the report."""
        return {}

    def simulated(self, case: Case, policy: str) -> list[Report]:
        """The live run's requests as they were sent; the whole trace at full scale where it is more."""
        speed = ["--speed", str(case.speed)]
        scale = ["--scale", str(case.scale), "--output-scale", str(case.scale)]
        scale += ["--accepted", str(1 / case.scale), "--until", str(case.until_s)]
        runs = [
            self.sim(case.file, policy, *speed, *scale, "--seed", str(seed))
            for seed in range(SEEDS)
        ]
        runs.sort(key=lambda run: run["ttft_ms"]["mean"])
        middle = of_one_token(runs[SEEDS // 2], case.scale)
        middle["ttft_mean_ms_by_seed"] = [run["ttft_ms"]["mean"] for run in runs]
        reports = [middle]
        if not case.is_whole:
            whole = self.sim(case.file, policy, *speed)
            reports.append(whole | {"trace": f"{case.name} (whole)"})
        return reports


def of_one_token(report: Report, stands_for: int) -> Report:
    """The report with times per token of those tokens of which so many went into one."""
    for times in ("tpot_quantiles_ms", "itl_ms"):
        for figure in (report[times] or {}).keys() - {"count"}:
            report[times][figure] /= stands_for
    report["tpot_curve_ms"] = [ms / stands_for for ms in report["tpot_curve_ms"]]
    report["tpot_ms"] = report["tpot_ms"] and report["tpot_ms"] / stands_for
    return report


def write(reports: Sequence[Report], out: Path) -> list[Path]:
    """The list as JSON, one report a line, and a picture beside it for each trace."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(rounded(report), separators=(",", ":")) for report in reports)
    out.write_text(f"[\n{text}\n]\n")
    pictures: list[Path] = []
    for trace in dict.fromkeys(report["trace"].removesuffix(" (whole)") for report in reports):
        chosen = [r for r in reports if r["trace"].removesuffix(" (whole)") == trace]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{out.stem}.{trace}.png")
        pictures += plot.draw(chosen, out.parent / name)
    return pictures


def main() -> int:
    """Run all cases; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, help="files; those of bench/traces if none")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of each worker")
    parser.add_argument("--block-tokens", type=int, help="of the traces; found out if left out")
    parser.add_argument("--preset", default="h200", help="whose step costs the workers have")
    parser.add_argument("--util", type=float, help="share of the fleet that all prompts would take")
    parser.add_argument("--live-s", type=float, default=220, help="for all live runs together")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/routing.json")
    args = parser.parse_args()
    traces: list[Path] = args.traces or sorted((ROOT / "bench/traces").glob("*.gz"))
    policies: list[str] = args.policies.split(",")
    if unknown := set(policies) - set(POLICIES):
        parser.error(f"--policies: there is no {', '.join(sorted(unknown))}")
    bench = Bench(args)
    live_s = max(args.live_s / (len(traces) * len(policies)), LEAST_LIVE_S)
    # As a reader would repeat it, whatever this machine's folders are.
    origin = {
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.routing.run", *sys.argv[1:]]),
    }
    reports: list[Report] = []

    def keep(case: Case, report: Report) -> None:
        setting = {
            "workers": args.workers, "blocks": args.blocks, "preset": args.preset,
            "util": case.util, "speed": case.speed, "block_tokens": case.block_tokens,
            "until_s": None if case.is_whole else case.until_s,
        }  # fmt: skip
        if report["mode"] == "live":
            setting |= {"mock_speed": case.mock_speed, "scale": case.scale}
        if report["errors"]:
            print(f"  {report['errors']} errors: {report['errors_by_kind']}", file=sys.stderr)
        reports.append(report | setting | origin)

    try:
        cases = [bench.case(file, live_s) for file in traces]
        for case in cases:
            for policy in policies:
                print(f"live: {case.name}, {policy}", file=sys.stderr, flush=True)
                keep(case, bench.live(case, policy))
        # Nothing here measures this machine: all cores at once.
        print("simulating the same, and whole traces", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            runs = [(case, policy) for case in cases for policy in policies]
            simulated = [pool.submit(bench.simulated, case, policy) for case, policy in runs]
            for (case, _), done in zip(runs, simulated, strict=True):
                for report in done.result():
                    keep(case, report)
    except ProcessDiedError as error:
        print(f"bench-routing: {error}", file=sys.stderr)
        return 1
    print(table(reports))
    for picture in write(reports, args.out):
        print(picture)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulation of split and aggregated serving against live runs: a real router, mock workers, the same requests.

    .venv/bin/python -m bench.disagg.live --out bench/results/disagg_live.json

Requests like those of the first workload of run.py, and each side's best setting at one target (given by flags): sent
through HTTP while the fleet's clock runs --mock-speed times as fast as ours, and simulated. Tokens stand for 16 each
on the wire, as in `bench/routing`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.helpers.fleet import fleet
from bench.helpers.report import ROOT, rounded, write

Report = dict[str, Any]

SCALE = 16
TRACE_BLOCK = 512
BLOCKS = 775  # the H200 preset's pool in blocks of 512 tokens
PATIENCE_MS = 3_600_000
QUANTILES = ("mean", "p50", "p90", "p99")


def requests(folder: Path, count: int) -> Path:
    """8k tokens in, 1k out, a quarter more or less, one a second on average."""
    draw, at_ms = random.Random(0), 0.0
    lines = ["timestamp_ms,input_length,output_length"]
    for _ in range(count):
        prompt, answer = (round(n * draw.uniform(0.75, 1.25)) for n in (8192, 1024))
        lines.append(f"{at_ms:.3f},{prompt},{answer}")
        at_ms += draw.expovariate(1.0) * 1e3
    file = folder / "requests.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


class Side:
    """One fleet, live and simulated."""

    def __init__(self, args: argparse.Namespace, roles: list[str], chunk: int, rate: float) -> None:
        self.args, self.roles, self.rate = args, roles, rate
        self.model = ["--preset", "h200", "--blocks", str(BLOCKS), "--batched-tokens", str(chunk)]
        self.model += ["--accepted", str(1 / SCALE)]
        self.sent = ["--speed", str(rate), "--scale", str(SCALE), "--output-scale", str(SCALE)]

    def live(self, file: Path, worker_queue_ms: float) -> Report:
        """Through a real router; `worker_queue_ms` is its default, here on the mock's clock."""
        speed = self.args.mock_speed
        router: list[str | Path] = [
            self.args.bin / "headrace-router", "--policy", "kv", "--queue-timeout-ms", str(PATIENCE_MS),
            "--worker-queue-ms", str(max(round(worker_queue_ms / speed), 1)),
            "--first-token-timeout-ms", str(PATIENCE_MS),
        ]  # fmt: skip
        mock: list[str | Path] = [
            self.args.bin / "headrace-bench", "mock", *self.model, "--speed", str(speed),
            "--block-tokens", str(TRACE_BLOCK // SCALE), "--token-scale", str(SCALE),
        ]  # fmt: skip
        with fleet(router, mock, self.args.workers, self.roles) as (running, folder):
            out = folder / "report.json"
            replay: list[str | Path] = [
                self.args.bin / "headrace-bench", "replay", file, "--target", running.address, *self.sent,
                "--mock-speed", str(speed), "--mock-tokens", str(SCALE), "--timeout-s", "300", "--json", out,
            ]  # fmt: skip
            running.run(replay, folder, 300)
            return json.loads(out.read_text())

    def simulated(self, file: Path, folder: Path) -> Report:
        """The same requests in virtual time."""
        out = folder / "sim.json"
        command: list[str | Path] = [
            self.args.bin / "headrace-bench", "sim", file, *self.model, *self.sent, *self.roles,
            "--queue-timeout-ms", str(PATIENCE_MS), "--json", out,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(out.read_text())


def figures(report: Report, per_token: float) -> Report:
    """Times to the first token and per token of the model; `replay` divides by itself."""
    ttft, tpot = report["ttft_ms"], report["tpot_quantiles_ms"]
    return {
        "errors": report["errors"], "ttft_ms": {name: ttft[name] for name in QUANTILES},
        "tpot_ms": {name: tpot[name] / per_token for name in QUANTILES},
    }  # fmt: skip


def main() -> int:
    """Run both sides live and simulated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=4, help="of the split side")
    parser.add_argument("--chunk", type=int, default=512, help="of the aggregated side")
    parser.add_argument("--split-chunk", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=1.8, help="requests a second, for both sides")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--mock-speed", type=float, default=5.0)
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    apart = ["--prefill", str(args.prefill), "--decode", str(args.workers - args.prefill)]
    sides = {
        "aggregated": Side(args, ["--workers", str(args.workers)], args.chunk, args.rate),
        "split": Side(args, apart, args.split_chunk, args.rate),
    }
    rows: Report = {}
    with tempfile.TemporaryDirectory() as name:
        file = requests(Path(name), args.requests)
        for side, run in sides.items():
            sim = run.simulated(file, Path(name))
            live = run.live(file, sim["router_ms"]["worker_queue"])
            rows[side] = {"live": figures(live, 1), "sim": figures(sim, SCALE)}
    setting = {
        "requests": args.requests,
        "requests_per_s": args.rate,
        "mock_speed": args.mock_speed,
    }
    write(args.out, rounded(setting | {"sides": rows}))
    return int(any(of["errors"] for row in rows.values() for of in row.values()))


if __name__ == "__main__":
    sys.exit(main())

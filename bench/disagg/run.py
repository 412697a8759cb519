"""Split against aggregated serving: the highest request rate at which targets for first token and time per token hold.

    .venv/bin/python -m bench.disagg.run --out bench/results/disagg.json

The same number of workers, all of them DeepSeek-R1 on an H200, serve the same requests in virtual time
(`headrace-bench sim`, policy kv), either as workers that do both or as prefill and decode workers. A rate holds if
99 % of the requests get their first token in the target's time and 99 % have a mean time per token below the
target's. For each target both sides get their best setting: the aggregated one its best step size in tokens
(`--batched-tokens`, which bounds the chunk of prompts that a decode step carries), the split one its best number of
prefill workers and the best of two step sizes.
"""

import argparse
import gzip
import itertools
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, rounded, write

Report = dict[str, Any]

CHUNKS = [512, 1024, 256, 2048, 8192]
SPLIT_CHUNKS = [8192, 2048]
NEIGHBOURS = 2  # splits on either side of the one that halves the work which are tried
STEP = 1.05  # rates are powers of it, from LOWEST to HIGHEST: 0.05 to 81 requests a second
LOWEST, HIGHEST = -60, 90
FIRST = 0.5  # of what the fleet could serve if no step had to wait: a start for the search
ROWS = 40  # with so many rows in each decode step
PATIENCE_MS = 3_600_000
TRACE_BLOCK = 512  # of CSV traces and of Mooncake's
PRESET_BLOCK = 64
BLOCKS = {"h200": 6200, "b200": 8846, "gb200": 9142}


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one kind: mean tokens, each request's being up to a quarter more or less."""

    prompt: int
    answer: int
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent, and the time to the first token that 99 % of it must keep."""

    name: str
    ttft_ms: float
    tpot_ms: tuple[float, ...]
    shapes: tuple[Shape, ...] = ()
    trace: str | None = None
    requests: int = 1000


WORKLOADS = [
    Workload(
        name="8k in, 1k out", ttft_ms=4000, tpot_ms=(30, 40, 50, 80), shapes=(Shape(8192, 1024),)
    ),
    Workload(
        name="8k in, 256 out and 1k in, 2k out, half each", ttft_ms=4000, tpot_ms=(30, 40, 50, 80),
        shapes=(Shape(8192, 256, 0.5), Shape(1024, 2048, 0.5)),
    ),
    Workload(
        name="4k in, 256 out", ttft_ms=4000, tpot_ms=(30, 40, 50, 80), shapes=(Shape(4096, 256),),
        requests=1500,
    ),
    Workload(
        name="1k in, 1k out", ttft_ms=4000, tpot_ms=(30, 40, 50, 80), shapes=(Shape(1024, 1024),),
        requests=1500,
    ),
    Workload(
        name="32k in, 512 out", ttft_ms=15_000, tpot_ms=(30, 40, 50, 80), shapes=(Shape(32_768, 512),),
        requests=500,
    ),
    Workload(
        name="Mooncake conversation", ttft_ms=60_000, tpot_ms=(40, 80),
        trace="mooncake_conversation_0-40min", requests=1000,
    ),
    Workload(
        name="Mooncake synthetic", ttft_ms=30_000, tpot_ms=(40, 80),
        trace="mooncake_synthetic_first65pct", requests=1000,
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet: `prefill` workers of `workers` compute prompts for the others; with 0 all do both."""

    workers: int
    prefill: int
    chunk: int

    def flags(self) -> list[str]:
        """For `headrace-bench sim` and `mock`."""
        if self.prefill == 0:
            roles = ["--workers", str(self.workers)]
        else:
            decode = self.workers - self.prefill
            roles = ["--prefill", str(self.prefill), "--decode", str(decode)]
        return [*roles, "--batched-tokens", str(self.chunk)]


@dataclass(slots=True)
class Study:
    """One workload, and all that was simulated of it. Rates are `STEP ** n` requests a second."""

    args: argparse.Namespace
    workload: Workload
    file: Path
    per_s: float  # as recorded
    first: int  # where to look first
    done: dict[tuple[Setting, int], Report] = field(default_factory=dict)

    def sim(self, setting: Setting, n: int) -> Report:
        """Simulate at one rate."""
        if (setting, n) not in self.done:
            self.done[setting, n] = self.simulate(setting, STEP**n)
        return self.done[setting, n]

    def simulate(self, setting: Setting, rate: float, *extra: str) -> Report:
        """Simulate at this rate. Raises SystemExit with the program's words."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            command = [
                self.args.bin / "headrace-bench", "sim", self.file, "--policy", self.args.policy,
                "--preset", self.args.preset, "--blocks", str(self.blocks()),
                "--speed", str(rate / self.per_s), "--limit", str(self.workload.requests),
                "--queue-timeout-ms", str(PATIENCE_MS), *setting.flags(), *self.network(), *extra,
                "--json", out,
            ]  # fmt: skip
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode != 0:
                raise SystemExit(f"{shlex.join(map(str, command))}\n{ran.stderr}")
            return json.loads(out.read_text())

    def network(self) -> list[str]:
        """What moving KV costs, where it is not the preset's."""
        gbps = self.args.kv_gbps
        return ["--kv-gbps", str(gbps)] if gbps else []

    def blocks(self) -> int:
        """The preset's pool in blocks of the trace's size."""
        return BLOCKS[self.args.preset] * PRESET_BLOCK // TRACE_BLOCK

    def holds(self, setting: Setting, n: int, tpot_ms: float) -> bool:
        """99 % of the requests keep both targets at this rate."""
        report = self.sim(setting, n)
        fine = report["ttft_ms"]["p99"] <= self.workload.ttft_ms
        return report["errors"] == 0 and fine and report["tpot_quantiles_ms"]["p99"] <= tpot_ms

    def best(self, settings: Sequence[Setting], tpot_ms: float) -> tuple[Setting, int] | None:
        """The setting with the highest rate that holds, and that rate; `None` if none holds in any."""
        best: tuple[Setting, int] | None = None
        for setting in settings:
            if best is not None and not self.holds(setting, best[1] + 1, tpot_ms):
                continue  # one run tells
            most = self.most(setting, self.first if best is None else best[1] + 1, tpot_ms)
            best = best if most is None else (setting, most)
        return best

    def most(self, setting: Setting, n: int, tpot_ms: float) -> int | None:
        """The highest rate that holds, looked for from `n` on; `None` if the lowest does not."""
        stride = 4
        if self.holds(setting, n, tpot_ms):
            while self.holds(setting, min(n + stride, HIGHEST), tpot_ms) and n < HIGHEST:
                n += stride
            low, high = n, n + stride
        else:
            while n > LOWEST and not self.holds(setting, n - stride, tpot_ms):
                n -= stride
            if n <= LOWEST:
                return None
            low, high = n - stride, n
        while high - low > 1:
            middle = (low + high) // 2
            if self.holds(setting, middle, tpot_ms):
                low = middle
            else:
                high = middle
        return low

    def summary(self, best: tuple[Setting, int] | None) -> Report | None:
        """What the table and the file say of one side."""
        if best is None:
            return None
        setting, n = best
        report = self.sim(setting, n)
        times = {name: report[name] for name in ("ttft_ms", "tpot_quantiles_ms", "itl_ms")}
        return {
            "workers": setting.workers, "prefill": setting.prefill, "chunk": setting.chunk,
            "requests_per_s": STEP**n, "tokens_per_s": report["tokens_per_s"],
            "token_hit_rate": report["token_hit_rate"], "pairs": report.get("split"), **times,
        }  # fmt: skip


def study(args: argparse.Namespace, workload: Workload, folder: Path) -> list[Report]:
    """The best of both sides for each target of one workload."""
    file, per_s, lengths = requests(workload, folder)
    n = args.workers
    prefill_ms, decode_ms = work_ms(args.preset, lengths)
    first = round(math.log(FIRST * n * 1e3 / (prefill_ms + decode_ms), STEP))
    work = Study(args, workload, file, per_s, first)
    even = min(max(round(n * prefill_ms / (prefill_ms + decode_ms)), 1), n - 1)
    near = [p for p in range(1, n) if abs(p - even) <= NEIGHBOURS]
    splits = sorted(near, key=lambda prefill: abs(prefill - even))
    rows: list[Report] = []
    for tpot_ms in workload.tpot_ms:
        together = work.best([Setting(n, 0, chunk) for chunk in CHUNKS], tpot_ms)
        pairs = [Setting(n, prefill, chunk) for chunk in SPLIT_CHUNKS for prefill in splits]
        apart = work.best(pairs, tpot_ms)
        row: Report = {
            "workload": workload.name, "requests": workload.requests,
            "ttft_target_ms": workload.ttft_ms, "tpot_target_ms": tpot_ms,
            "aggregated": work.summary(together), "split": work.summary(apart),
        }  # fmt: skip
        row["gain"] = gain(row)
        print(line(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


Lengths = list[tuple[int, int]]


def work_ms(preset: str, lengths: Lengths) -> tuple[float, float]:
    """Mean ms of a worker that a prompt and an answer take, prefix caches left out."""
    figures = json.loads((ROOT / "bench/presets" / f"{preset}.json").read_text())
    cost, step = figures["cost"], figures["batched_tokens"]
    prefill = decode = 0.0
    for prompt, answer in lengths:
        prefill += (cost["prefill_ms"] + cost["fixed_ms"] / step) * prompt
        prefill += cost["context_ms"] * prompt**2 / 2
        row = cost["fixed_ms"] / ROWS + cost["row_ms"] + cost["kv_ms"] * (prompt + answer / 2)
        decode += row * answer
    return prefill / len(lengths), decode / len(lengths)


def requests(workload: Workload, folder: Path) -> tuple[Path, float, Lengths]:
    """A file with the requests, how many come in a second of it, and tokens of prompts and answers."""
    lengths: Lengths = []
    if workload.trace is not None:
        file = ROOT / "bench/traces" / f"{workload.trace}.jsonl.gz"
        with gzip.open(file, "rt") as text:
            rows = [json.loads(row) for row in itertools.islice(text, workload.requests)]
        lengths = [(row["input_length"], row["output_length"]) for row in rows]
        span_ms = rows[-1]["timestamp"] - rows[0]["timestamp"]
        return file, (len(rows) - 1) * 1e3 / span_ms, lengths
    draw = random.Random(workload.name)
    shapes, shares = workload.shapes, [shape.share for shape in workload.shapes]
    lines = ["timestamp_ms,input_length,output_length"]
    at_ms = 0.0
    for shape in draw.choices(shapes, shares, k=workload.requests):
        prompt, answer = (round(n * draw.uniform(0.75, 1.25)) for n in (shape.prompt, shape.answer))
        lines.append(f"{at_ms:.3f},{prompt},{answer}")
        lengths.append((prompt, answer))
        at_ms += draw.expovariate(1.0) * 1e3
    file = folder / (re.sub(r"[^a-z0-9]+", "-", workload.name.lower()) + ".csv")
    file.write_text("\n".join(lines) + "\n")
    return file, workload.requests * 1e3 / at_ms, lengths


def gain(row: Report) -> float | None:
    """How many times as many requests the split side serves."""
    together, apart = row["aggregated"], row["split"]
    if together is None or apart is None:
        return None
    return apart["requests_per_s"] / together["requests_per_s"]


def line(row: Report) -> str:
    """One row of the table."""

    def side(figures: Report | None, setting: Callable[[Report], str]) -> str:
        return "-" if figures is None else f"{figures['requests_per_s']:.2f} ({setting(figures)})"

    together = side(row["aggregated"], lambda f: f"chunk {f['chunk']}")
    apart = side(
        row["split"], lambda f: f"{f['prefill']}+{f['workers'] - f['prefill']}, chunk {f['chunk']}"
    )
    ratio = "-" if row["gain"] is None else f"{row['gain']:.2f}x"
    cells = [row["workload"], f"{row['ttft_target_ms'] / 1e3:g} s", f"{row['tpot_target_ms']:g} ms"]
    return "| " + " | ".join([*cells, together, apart, ratio]) + " |"


HEAD = """| requests | first token, p99 | per token, p99 | aggregated, requests/s | split, requests/s | gain |
|---|---|---|---|---|---|"""


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--workloads", help="numbers, counted from 0, comma separated; all if left out"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--preset", default="h200", choices=sorted(BLOCKS))
    parser.add_argument("--policy", default="kv")
    parser.add_argument("--kv-gbps", type=float, help="in place of the preset's network card")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    chosen = map(int, args.workloads.split(",")) if args.workloads else range(len(WORKLOADS))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        runs = [pool.submit(study, args, WORKLOADS[i], folder) for i in chosen]
        rows = [row for run in runs for row in run.result()]
    print("\n".join([HEAD, *map(line, rows)]))
    if args.out is not None:
        figures = {
            "preset": args.preset, "workers": args.workers, "policy": args.policy,
            "kv_gbps": args.kv_gbps, "rows": rounded(rows),
        }  # fmt: skip
        write(args.out, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

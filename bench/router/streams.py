"""What a token of a running stream costs the router, beside a bare loop of writes, and what a waiting stream holds.

Workers are `headrace-bench mock`, clients `headrace-bench load`, the bare loop `headrace-bench writes`. They take turns
in one run, since a machine is not the same twice. Build first:

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.streams --out bench/results/router_streams.json

`--before DIR` adds the router of another build to each turn. Instructions are counted by callgrind, where it is
installed.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from bench.helpers.report import ROOT, write
from bench.router.overhead import Stack, load, stack
from bench.router.tokens import CALLGRIND, counted
from headrace.models.load.source import resolve

STEP_MS = 20.0
EVENTS = 128
WAIT_LIMIT_S = 60
WAITING_STEP_MS = 1000.0
WAITING_TOKENS = "200"  # none ends before all have begun


def writes(bench: Path, streams: int) -> float:
    """CPU microseconds of the bare loop for an event."""
    command = [bench, "writes", "--step-ms", str(STEP_MS), "--events", str(EVENTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bare:
        try:
            assert bare.stdout is not None
            target = bare.stdout.readline().strip().removeprefix("http://")
            flags = [
                "-n",
                str(2 * streams),
                "-c",
                str(streams),
                "--max-tokens",
                str(EVENTS),
                "--chat",
            ]
            done = subprocess.run(
                [bench, "load", "--json", "-", "--target", target, "--pids", str(bare.pid), *flags],
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            bare.kill()
    return json.loads(done.stdout)["cpu_s"][0] / (2 * streams * EVENTS) * 1e6


def paced(binaries: Path, doc: Path, folder: Path, streams: int) -> dict[str, float]:
    """CPU microseconds of a router for a token at a pace; what its requests cost is in there."""
    folder.mkdir()
    with stack(binaries, doc, 2, STEP_MS, folder) as two:
        load(binaries, two, "-n", "100", "-c", "8", "--max-tokens", "4", "--chat")
        flags = ["-n", str(2 * streams), "-c", str(streams), "--max-tokens", str(EVENTS), "--chat"]
        result = load(binaries, two, *flags)
    return {
        "us_per_token": result["cpu_s"][0] / result["completion_tokens"] * 1e6,
        "us_per_event": result["cpu_s"][0] / result["chunks"] * 1e6,
        "tokens_per_s": result["tokens_per_s"],
        "itl_p50_ms": result["itl_ms"]["p50"],
        "itl_p99_ms": result["itl_ms"]["p99"],
    }


def instructions(binaries: Path, doc: Path, folder: Path) -> float:
    """Instructions of a router for a token, user space: the difference of long answers and longer ones."""
    streams, counts, tokens = 64, list[int](), (50, 250)
    for number in tokens:
        run = folder / f"{number}"
        run.mkdir(parents=True)
        with stack(binaries, doc, 1, 100.0, run, CALLGRIND) as one:
            flags = ["-n", str(streams), "-c", str(streams), "--max-tokens", str(number), "--chat"]
            load(binaries, one, *flags)
        counts.append(counted((run / "router.log").read_text()))
    return (counts[1] - counts[0]) / ((tokens[1] - tokens[0]) * streams)


def resident(running: Stack) -> int:
    """Bytes of a router's memory."""
    status = Path(f"/proc/{running.router.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def begun(running: Stack) -> int:
    """How many answers have their first token."""
    with urllib.request.urlopen(f"http://{running.address}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    counts = (line for line in lines if line.startswith("headrace_ttft_seconds_count"))
    return sum(int(line.split()[-1]) for line in counts)


def waiting(binaries: Path, doc: Path, folder: Path, streams: int) -> float:
    """KiB of a router's memory for a stream that waits for its next token."""
    folder.mkdir()
    with stack(binaries, doc, 1, WAITING_STEP_MS, folder) as one:
        load(binaries, one, "-n", "1", "-c", "1", "--max-tokens", "1", "--chat")
        before, others = resident(one), begun(one)
        command = [binaries / "headrace-bench", "load", "--json", "-", "--target", one.address]
        command += [
            "-n",
            str(streams),
            "-c",
            str(streams),
            "--max-tokens",
            WAITING_TOKENS,
            "--chat",
        ]
        clients = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + WAIT_LIMIT_S
            while begun(one) < others + streams:
                assert time.monotonic() < deadline, "the streams do not begin"
                time.sleep(0.2)
            held = resident(one) - before
        finally:
            clients.kill()
            clients.wait()
    return held / streams / 1024


def main() -> None:
    """Take turns and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--before", type=Path, help="folder with another build")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--waiting", type=int, default=2048)
    args = parser.parse_args()
    routers: dict[str, Path] = {"router": args.bin}
    if args.before is not None:
        routers = {"before": args.before, **routers}
    bare: list[float] = []
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
    figures: dict[str, Any] = {"streams": args.streams, "step_ms": STEP_MS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doc = folder / "doc.json"
        doc.write_bytes(resolve(None).doc())
        for turn in range(args.turns):
            bare.append(writes(args.bin / "headrace-bench", args.streams))
            for which, binaries in routers.items():
                turns[which].append(paced(binaries, doc, folder / f"{which}{turn}", args.streams))
        figures["bare_us_per_event"] = bare
        for which, binaries in routers.items():
            found: dict[str, Any] = {"turns": turns[which]}
            of_bare = [
                turn["us_per_event"] / loop for turn, loop in zip(turns[which], bare, strict=True)
            ]
            found["times_bare_median"] = median(of_bare)
            if shutil.which("valgrind") is not None:
                found["instructions_per_token"] = instructions(
                    binaries, doc, folder / f"{which}-ir"
                )
            if args.waiting:
                found["waiting_kib_per_stream"] = waiting(
                    binaries, doc, folder / f"{which}-rss", args.waiting
                )
            figures[which] = found
    write(args.out, figures)


if __name__ == "__main__":
    main()

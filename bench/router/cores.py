"""What one router does on one core, on two, on four: whether more cores carry more.

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.cores --out bench/results/router_cores.json

The router is bound to so many cores, half of the machine at most; workers without a model and clients share the others,
so that they never run where the router does. The router starts as many threads as it has cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.helpers import clients
from bench.helpers.report import ROOT, rounded, write
from bench.peers.processes import cpu_s, raise_descriptor_limit
from bench.router.overhead import Stack, load
from headrace.models.load.source import resolve

RUN_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What all clients together ask for; each client process runs an equal part of the streams."""

    what: str
    unit: str  # of the report of a client
    streams: int
    step_ms: float
    flags: Sequence[str]


LOADS = [
    Load(
        what="short chats of one token",
        unit="requests",
        streams=192,
        step_ms=0.0,
        flags=["--max-tokens", "1", "--unary", "--chat"],
    ),
    Load(
        what="streams of 128 tokens, a token each 10 ms",
        unit="completion_tokens",
        streams=6_000,
        step_ms=10.0,
        flags=["--max-tokens", "128", "--chat"],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Numbers of cores."""

    router: list[int]
    workers: list[int]
    clients: list[int]


def places(cores: Sequence[int]) -> Places:
    """Half of them for the router, an eighth for workers, the rest for clients; two cores are one and one."""
    half, workers = len(cores) // 2, max(1, len(cores) // 8)
    others = list(cores[half:])
    return Places(
        router=list(cores[:half]),
        workers=others[:workers],
        clients=others[workers:] or others,
    )


def on(cores: Sequence[int]) -> list[str]:
    """The beginning of a command that is to run on these cores alone."""
    chosen = "set(map(int, sys.argv[1].split(',')))"
    program = (
        f"import os, sys; os.sched_setaffinity(0, {chosen}); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", program, ",".join(map(str, cores))]


def siblings(cores: Sequence[int]) -> list[str]:
    """Cores that are threads of one, as the system says; two such cores do less than two."""
    found: set[str] = set()
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if path.exists():
            found.add(path.read_text().strip())
    return sorted(found)


def run(args: argparse.Namespace, doc: Path, folder: Path, what: Load, cores: list[int]) -> Any:
    """One load against a router on these cores."""
    chosen: Places = args.places
    folder.mkdir()
    streams = str(max(1, what.streams // len(chosen.clients)))
    with_room = ["--max-streams", "65536", "--max-connections", "131072", "--log-level", "warn"]
    os.sched_setaffinity(0, chosen.workers)  # which the workers inherit
    running = Stack(args.bin, doc, args.workers, what.step_ms, folder, on(cores), with_room)
    try:
        os.sched_setaffinity(0, chosen.clients)
        warm = ["--first", "1000000000", "-n", "200", "-c", "8", "--max-tokens", "4", "--chat"]
        load(args.bin, running, *warm)
        router = [running.router.pid]
        workers = [worker.pid for worker in running.workers]
        command = [*(args.bin / "headrace-bench", "load", "--json", "-"), "-c", streams]
        command += ["--target", running.address, "--duration", f"{args.seconds}s", *what.flags]
        router_before, workers_before = cpu_s(router), cpu_s(workers)
        began = time.monotonic()
        seeds = [str(i + 1) for i in range(len(chosen.clients))]
        reports = clients.reports([[*command, "--seed", seed] for seed in seeds], RUN_LIMIT_S)
        wall_s = time.monotonic() - began
        router_s, workers_s = cpu_s(router) - router_before, cpu_s(workers) - workers_before
    finally:
        running.stop()
    return figures(what, reports, router_s, wall_s) | {
        "router_cores": router_s / wall_s,
        "worker_cores": workers_s / wall_s,
        "cores": len(cores),
    }


def figures(what: Load, reports: list[Any], router_s: float, wall_s: float) -> dict[str, Any]:
    """Of all clients. A quantile is the median of theirs, since they ask for the same."""
    units = sum(report[what.unit] for report in reports)

    def quantile(name: str, which: str) -> float | None:
        found = [report[name][which] for report in reports if report[name]]
        return statistics.median(found) if found else None

    return {
        "what": what.what,
        "unit": what.unit,
        "errors": sum(report["errors"] for report in reports),
        "a_second": units / wall_s,
        "router_us": router_s / units * 1e6,
        "busiest_client_cores": max(report["client_cpu_share"] for report in reports),
        "ttft_p50_ms": quantile("ttft_ms", "p50"),
        "ttft_p99_ms": quantile("ttft_ms", "p99"),
        "itl_p50_ms": quantile("itl_ms", "p50"),
        "itl_p99_ms": quantile("itl_ms", "p99"),
    }


def powers_of_two(most: int) -> list[int]:
    found = [1]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def main() -> None:
    """Run all rounds and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    raise_descriptor_limit()
    cores = sorted(os.sched_getaffinity(0))
    args.places = places(cores)
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doc = folder / "doc.json"
        doc.write_bytes(resolve(None).doc())
        for i in range(args.rounds):
            for what in LOADS:
                for count in powers_of_two(len(args.places.router)):
                    place = folder / f"{i}-{len(rows)}"
                    row = run(args, doc, place, what, args.places.router[:count])
                    rows.append(rounded(row | {"round": i}))
                    print(f"cores: {rows[-1]}", flush=True)
    os.sched_setaffinity(0, cores)
    placed = {name: getattr(args.places, name) for name in ("router", "workers", "clients")}
    write(args.out, {"places": placed, "siblings": siblings(cores), "runs": rows})


if __name__ == "__main__":
    main()

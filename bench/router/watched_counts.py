"""What it costs a router to be watched, in instructions: a line of its log, an event of its dashboard, a scrape.

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.router.watched_counts --out bench/results/router_watched_counts.json

Each of these costs the same however much the router has to do, and comes so often a second, so the result is a share
of a busy core. Rounds of `bench.router.watched` differ by more than that; instructions, which callgrind counts, do not.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.budget.__main__ import CASES, COUNTERS, END_LIMIT_S, whole
from bench.helpers.report import ROOT, write
from bench.router.overhead import Stack, load
from bench.router.watched import SCRAPE_S, dashboard
from headrace.models.load.source import resolve

CHATS = 2_000
SECONDS = 60.0  # that each run takes after its chats, so that time costs all of them the same
SCRAPES = 60
LINES_S = 20  # `--log-requests-per-s`, where nobody says otherwise
EVENTS_S = 1.0  # of the dashboard
NO_LINES = ["--log-requests-per-s", "0"]
ALL_LINES = ["--log-requests-per-s", "1000000"]
Watcher = Callable[[str], contextlib.AbstractContextManager[list[int]]]


@contextlib.contextmanager
def nobody(address: str) -> Generator[list[int]]:
    """Looks at nothing."""
    del address
    yield []


@contextlib.contextmanager
def scrapes(address: str) -> Generator[list[int]]:
    """Reads the metrics so many times in the end; the bytes of each page."""
    came: list[int] = []
    yield came
    for _ in range(SCRAPES):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
            came.append(len(page.read()))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Instructions of a router from its start to its end, and how often it was looked at."""

    instructions: float
    looks: int
    bytes: float  # of a look


def counted(bin_dir: Path, doc: Path, flags: Sequence[str], watcher: Watcher) -> Counted:
    (counter,) = (counter for counter in COUNTERS if counter.name == "valgrind")
    with tempfile.TemporaryDirectory(prefix="headrace-watched-") as name:
        folder = Path(name)
        file = folder / "counts"
        running = Stack(bin_dir, doc, 2, 0.0, folder, counter.command(file), flags)
        try:
            with watcher(running.address) as came:
                load(bin_dir, running, *CASES["short_chat"].flags(CHATS))
                time.sleep(SECONDS)
            running.router.terminate()
            running.router.wait(timeout=END_LIMIT_S)
            found = counter.parse(whole(file))
        finally:
            running.stop()
    return Counted(
        instructions=found["instructions"],
        looks=len(came),
        bytes=sum(came) / len(came) if came else 0.0,
    )


def main() -> None:
    """Count and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--instructions-per-s",
        type=float,
        default=1.5e9,
        help="that a busy core of this router does: those of a chat over its CPU time",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        doc = Path(name) / "doc.json"
        doc.write_bytes(resolve(None).doc())
        unwatched = counted(args.bin, doc, NO_LINES, nobody)
        logged = counted(args.bin, doc, ALL_LINES, nobody)
        looked = counted(args.bin, doc, NO_LINES, dashboard)
        scraped = counted(args.bin, doc, NO_LINES, scrapes)
    if not looked.looks:
        raise SystemExit("nothing came by the dashboard")
    figures: dict[str, Any] = {"unwatched_instructions": unwatched.instructions}
    shares: list[float] = []
    for what, run, looks, a_second in (
        ("a line of the log", logged, CHATS, float(LINES_S)),
        ("an event of the dashboard", looked, looked.looks, EVENTS_S),
        ("a scrape of the metrics", scraped, scraped.looks, 1 / SCRAPE_S),
    ):
        one = (run.instructions - unwatched.instructions) / looks
        shares.append(one * a_second / args.instructions_per_s)
        figures[what] = {
            "instructions": one,
            "bytes": run.bytes,
            "a_second": a_second,
            "share_of_a_core": shares[-1],
        }
    write(args.out, figures | {"share_of_a_core": sum(shares)})


if __name__ == "__main__":
    main()

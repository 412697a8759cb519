"""What the router uses for one more token and one more request, held to a file of budgets.

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.budget
    .venv/bin/python -m bench.budget --write     budgets from what is measured now, and their table in the documents

Each case runs in two lengths, and the difference is divided by how much longer the second one is, so that start and
end cancel. Instructions, allocations and atomic instructions are those of callgrind, system calls those of strace; all
are of the router's whole process, what it does beside requests included. Workers have no model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.budget import rules
from bench.budget.counts import (
    Counts,
    NotCountedError,
    TokensCameTogetherError,
    callgrind,
    read,
    strace,
)
from bench.budget.rules import each, lines, middle, table, verdict, written
from bench.budget.rules import read as read_budgets
from bench.helpers import page
from bench.helpers.report import ROOT, origin
from bench.router.overhead import Stack, load

FILE = ROOT / "bench/budget/budget.toml"
COMMAND = "bench.budget --write"
END_LIMIT_S = 300  # callgrind writes its file when the router ends
EVENTS_A_TOKEN = 0.97  # fewer, and tokens came together: then a token is not what was counted
TRIES = 3  # of a run whose tokens came together


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load in two lengths."""

    what: str
    flags: Callable[[int], list[str]]  # of `bench load`, for a length
    few: int
    many: int
    units: int  # in each step of length
    step_ms: float = 0.0
    streams: bool = False
    pairs: int = 1  # of runs, of which the median counts


STREAMS = 32
CHAT = ["--chat", "--unary", "--max-tokens", "1", "-c", "1", "--seed", "1"]
CASES: dict[str, Case] = {
    "token": Case(
        what="a streamed token, 32 streams, a token each 20 ms",
        flags=lambda n: [
            *("--chat", "--seed", "1", "--max-tokens", str(n)),
            *("-n", str(STREAMS), "-c", str(STREAMS)),
        ],
        few=64,
        many=320,
        units=STREAMS,
        step_ms=20.0,
        streams=True,
        pairs=3,  # one in ten is off by half: a start that took longer in one of its runs
    ),
    "short_chat": Case(
        what="a chat of 32 words, one token",
        flags=lambda n: [*CHAT, "-n", str(n)],
        few=200,
        many=1_000,
        units=1,
    ),
    "long_chat": Case(
        what="a chat of 8,000 words, 7,500 of them shared, one token",
        flags=lambda n: [*CHAT, "-n", str(n), "--prompt-words", "500", "--shared-prefix", "7500"],
        few=20,
        many=420,  # what differs between two starts is as much as dozens of chats
        units=1,
    ),
}

WHAT = {name: case.what for name, case in CASES.items()}


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A program that counts while it runs the router."""

    name: str
    command: Callable[[Path], list[str]]  # that writes to a file
    parse: Callable[[str], Counts]


COUNTERS = [
    Counter(
        name="valgrind",
        command=lambda file: [
            *("valgrind", "--tool=callgrind", "--collect-bus=yes"),
            f"--callgrind-out-file={file}",
        ],
        parse=callgrind,
    ),
    Counter(
        name="strace",
        # the router stays the child of this process, so that it hears of its end
        command=lambda file: ["strace", "-D", "-f", "-c", "-S", "name", "-o", str(file)],
        parse=strace,
    ),
]


def counted(case: Case, length: int, counter: Counter, bin_dir: Path, doc: Path) -> Counts:
    """What a router used from its start to its end, at the first try that can be counted."""
    for _ in range(TRIES - 1):
        try:
            return one_run(case, length, counter, bin_dir, doc)
        except TokensCameTogetherError as error:
            say(f"once more: {error}")
    return one_run(case, length, counter, bin_dir, doc)


def one_run(case: Case, length: int, counter: Counter, bin_dir: Path, doc: Path) -> Counts:
    with tempfile.TemporaryDirectory(prefix="headrace-budget-") as name:
        folder = Path(name)
        file = folder / "counts"
        running = Stack(bin_dir, doc, 1, case.step_ms, folder, counter.command(file))
        try:
            result = load(bin_dir, running, *case.flags(length))
            if case.streams and result["chunks"] < EVENTS_A_TOKEN * result["completion_tokens"]:
                raise TokensCameTogetherError(
                    f"{result['chunks']} events for {result['completion_tokens']} tokens: the "
                    "machine is too busy to count what a token costs"
                )
            running.router.terminate()
            running.router.wait(timeout=END_LIMIT_S)
            return counter.parse(whole(file))
        finally:
            running.stop()


def whole(file: Path) -> str:
    """What a counter wrote, once it wrote all: one that is not the router's own process ends after it."""
    deadline = time.monotonic() + END_LIMIT_S
    size = -1
    while time.monotonic() < deadline:
        now = file.stat().st_size if file.exists() else 0
        if now == size and now > 0:
            break
        size = now
        time.sleep(0.2)
    return read(file)


def measure(
    names: Sequence[str], counters: Sequence[Counter], bin_dir: Path, doc: Path
) -> dict[str, Counts]:
    """What one more costs, for each case."""
    found: dict[str, Counts] = {}
    for name in names:
        case = CASES[name]
        found[name] = {}
        for counter in counters:
            pairs: list[Counts] = []
            for _ in range(case.pairs):
                few, many = (
                    counted(case, length, counter, bin_dir, doc) for length in (case.few, case.many)
                )
                pairs.append(each(few, many, (case.many - case.few) * case.units))
            found[name] |= middle(pairs)
            say(f"{name}: {found[name]}")
    return found


def say(text: str) -> None:
    print(f"bench-budget: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--write", action="store_true", help="budgets from what is measured now")
    parser.add_argument("--out", type=Path, help="keep what was measured in this file")
    args = parser.parse_args()
    names: list[str] = args.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases {unknown[0]}: none of {', '.join(CASES)}")
    counters = [counter for counter in COUNTERS if shutil.which(counter.name)]
    missing = [counter.name for counter in COUNTERS if counter not in counters]
    if missing:
        say(f"{' and '.join(missing)} not installed: what only they count is not measured")
    if not counters or (args.write and (missing or set(names) != set(CASES))):
        parser.error("--write needs all cases and both counters, and a check at least one of them")
    from headrace.models.load.source import resolve

    with tempfile.TemporaryDirectory(prefix="headrace-budget-") as name:
        doc = Path(name) / "doc.json"
        doc.write_text(json.dumps({**json.loads(resolve(None).doc()), "context_tokens": 1 << 20}))
        try:
            measured = measure(names, counters, args.bin, doc)
        except NotCountedError as error:
            sys.exit(f"bench-budget: {error}")
    came_from = origin()
    if args.write:
        FILE.write_text(written(measured, came_from))
    budgets = read_budgets(FILE.read_text()) if FILE.exists() else {}
    found = lines(measured, {name: budgets[name] for name in names if name in budgets})
    print(table(found, WHAT))
    if args.write:
        page.write(COMMAND, rules.page(FILE.read_text(), WHAT))
    if args.out is not None:
        keep(args.out, {**came_from, "measured": measured})
    if failed := verdict(found, budgets):
        sys.exit("\n".join(["bench-budget failed:", *failed]))


def keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

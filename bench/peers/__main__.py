"""Headrace beside other routers: the same loads on each, in turns, with workers without a model.

    cargo build --release -p headrace-router -p headrace-bench
    .venv/bin/python -m bench.peers --out peers.json

Routers of others are installed into environments of their own under target/peers. One that cannot be installed is named
in the result with the reason. `--dry` runs small cases with what is in .venv: no router, Headrace, and nginx if this
machine has it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.helpers.report import origin, rounded
from bench.peers.cases import CASES, DRY_CASES, Case
from bench.peers.environments import ENVIRONMENTS, Environment, NotInstalledError
from bench.peers.measure import Run, Setting, one_run
from bench.peers.processes import raise_descriptor_limit
from bench.peers.routers import NAMES, RELEASE, systems
from bench.peers.summary import summary
from bench.peers.systems import Programs, System, built
from bench.peers.table import table


def arguments(typed: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(NAMES), help="some of: %(default)s")
    parser.add_argument(
        "--cases", help=f"some of: {','.join(case.name for case in CASES)}; all where left out"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each case and peer, in turns"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run without a fixed size")
    parser.add_argument("--seed", type=int, default=1, help="other seeds are other prompts")
    parser.add_argument(
        "--descriptors",
        type=int,
        help="that a process may have, at most; all that this machine allows where left out",
    )
    parser.add_argument("--bin", type=Path, default=RELEASE, help="where cargo has built")
    parser.add_argument("--out", type=Path, help="kept after every round")
    parser.add_argument("--dry", action="store_true", help="small, in seconds, nothing installed")
    args = parser.parse_args(typed)
    args.peers = chosen("--peers", args.peers, NAMES, parser)
    known = {case.name: case for case in (DRY_CASES if args.dry else CASES)}
    args.cases = [
        known[name] for name in chosen("--cases", args.cases or ",".join(known), known, parser)
    ]
    if args.dry:
        here = ["direct", "headrace", *(["nginx"] if shutil.which("nginx") else [])]
        args.peers = [name for name in args.peers if name in here]
        args.rounds = 1
    return args


def chosen(
    flag: str, typed: str, known: Sequence[str] | dict[str, Any], parser: argparse.ArgumentParser
) -> list[str]:
    names = typed.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name}: none of {', '.join(known)}")
    return names


def environments(names: Sequence[str]) -> tuple[dict[str, Environment], dict[str, str]]:
    """Those that can be had, and why others cannot."""
    found: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name in ENVIRONMENTS:
            try:
                found[name] = ENVIRONMENTS[name]()
            except NotInstalledError as error:
                missing[name] = str(error)
                say(f"{name} is left out: {error}")
    return found, missing


def say(text: str) -> None:
    print(f"bench-peers: {text}", file=sys.stderr, flush=True)


def in_turns(
    all_systems: list[System], cases: list[Case], rounds: int
) -> list[tuple[int, Case, System]]:
    """Every system once a case and round; each round begins with another one."""
    turns: list[tuple[int, Case, System]] = []
    for number in range(rounds):
        first = number % len(all_systems)
        order = all_systems[first:] + all_systems[:first]
        turns += [(number, case, system) for case in cases for system in order]
    return turns


def main() -> None:
    args = arguments()
    limit = raise_descriptor_limit(args.descriptors)
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as name:
        programs = own_programs(args, Path(name))
        found, missing = environments(args.peers)
        all_systems = systems(args.peers, programs, found, limit)
        setting = Setting(bench=programs.bench, seconds=args.seconds, seed=args.seed)
        runs: list[Run] = []

        def result() -> dict[str, Any]:
            rows = [asdict(run) for run in runs]
            own_engines = {system.name for system in all_systems if system.own_engine}
            return rounded(
                origin()
                | {
                    "versions": {
                        k: v for system in all_systems for k, v in system.versions.items()
                    },
                    "not_installed": missing,
                    "descriptors": limit,
                    "rounds": 1 + runs[-1].round,  # that have begun
                    "seconds": args.seconds,
                    "cases": {case.name: case.what for case in args.cases},
                    "summary": summary(rows, own_engines),
                    "runs": rows,
                }
            )

        for number, case, system in in_turns(all_systems, args.cases, args.rounds):
            run = one_run(system, case, number, setting)
            runs.append(run)
            say(told(run))
            if args.out is not None:
                keep(args.out, result())
        print(table(result()))
    if args.dry:
        failed = [told(run) for run in runs if run.why_not or run.figures["errors"]]
        sys.exit("\n".join(failed) if failed else 0)


def own_programs(args: argparse.Namespace, folder: Path) -> Programs:
    if args.dry:
        ours = [sys.executable, "-m", "headrace"]
        return Programs(
            router=[*ours, "router"], bench=[*ours, "bench"], mock=[*ours, "mock"], doc=None
        )
    from headrace.models.load.source import resolve

    doc = folder / "doc.json"
    doc.write_text(json.dumps({**json.loads(resolve(None).doc()), "context_tokens": 1 << 20}))
    return built(args.bin, doc)


def told(run: Run) -> str:
    """One run in one line."""
    begin = f"round {run.round} {run.case:7} {run.peer:9}"
    if run.why_not is not None:
        return f"{begin} {run.why_not}"
    shown = [
        "requests_per_s",
        "tokens_per_s",
        "router_us_a_request",
        "router_us_a_token",
        "other_cores",
    ]
    known = [(name, run.figures[name]) for name in shown if run.figures[name] is not None]
    return f"{begin} errors {run.figures['errors']}  " + "  ".join(
        f"{name} {value:,.2f}" for name, value in known
    )


def keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

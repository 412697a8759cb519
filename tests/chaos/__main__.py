"""`make chaos`: the whole matrix, as often as the time allows, and the file with what came of it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos import groups
from chaos.clients import Answer
from chaos.crowd import Tally
from chaos.faults import Outcome
from chaos.network import ROUTER_HOST, Place, inside, namespaces, no_namespaces
from chaos.plan import Shape, faults
from chaos.ranks.seam import plan
from chaos.report import passed, report, summary, table
from chaos.suite import opened
from helpers.origin import origin


def main() -> int:
    args = arguments()
    folder = Path(args.logs or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.groups:
        return of_groups(args, folder)
    why = no_namespaces()
    if why is None:
        workers = shape_of(args, hosts=True).workers
        with namespaces([ROUTER_HOST, *workers]) as places, inside(places[ROUTER_HOST]):
            result = asyncio.run(chaos(args, folder, places))
    else:
        print(f"no faults of the network: {why}")
        result = asyncio.run(chaos(args, folder, None))
    print(table(result["matrix"]))
    print()
    print(summary(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"logs: {folder}")
    return 0 if passed(result) else 1


def of_groups(args: argparse.Namespace, folder: Path) -> int:
    """Groups of ranks, mock or real; the exit status."""

    async def run() -> dict[str, Any]:
        began = time.monotonic()
        opening = groups.opened_groups(folder, args.seed, args.clients, real=args.real)
        async with opening as suite:
            faults = plan(args.seed, suite.ranks)
            if args.only:
                faults = (fault for fault in faults if args.only in fault.kind)
            await suite.run(faults, args.clients, began + args.seconds)
            what = "--groups --real" if args.real else "--groups"
            command = f'ARGS="{what} --clients {args.clients}"'
            return about(args, began, command) | suite.result()

    result = asyncio.run(run())
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"logs: {folder}")
    return 0 if groups.passed(result) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="(default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="of plan and requests (default: 1)")
    parser.add_argument("--out", help="file for the figures")
    parser.add_argument("--clients", type=int, default=200, help="(default: 200)")
    parser.add_argument("--prefill", type=int, default=2, help="(default: 2)")
    parser.add_argument("--decode", type=int, default=2, help="(default: 2)")
    parser.add_argument("--both", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--policies",
        default="round-robin,kv",
        help="of the router, each for a part of the time; all but kv split every request "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        action="store_true",
        help="faults of ranks of groups, on a mock fleet of two groups of four",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="with --groups: real ranks with a tiny DeepSeek, a group of two and one of four",
    )
    parser.add_argument(
        "--only",
        help="faults whose row and point, or kind with --groups, contain this, such as 'kill'",
    )
    parser.add_argument("--logs", help="folder for the logs of all processes")
    return parser.parse_args()


def shape_of(args: argparse.Namespace, *, hosts: bool) -> Shape:
    return Shape(args.prefill, args.decode, args.both, hosts)


async def chaos(
    args: argparse.Namespace, folder: Path, places: dict[str, Place] | None
) -> dict[str, Any]:
    """The whole run, a part for each policy; what goes into the file. With `places`, each worker has its own host."""
    shape = shape_of(args, hosts=places is not None)
    began = time.monotonic()
    policies: list[str] = args.policies.split(",")
    tally, outcomes, found, notes = Tally(), list[Outcome](), Counter[str](), list[str]()
    answers: dict[int, Answer] = {}
    transfers = Counter[str]()
    for i, policy in enumerate(policies):
        until_s = began + args.seconds * (i + 1) / len(policies)
        plan = faults(args.seed + i, shape)
        if args.only:
            plan = (fault for fault in plan if args.only in f"{fault.row} {fault.point}")
        (folder / policy).mkdir(exist_ok=True)
        opening = opened(shape, folder / policy, args.seed, args.clients, places, policy)
        async with opening as suite:
            suite.crowd.compare_with(answers)  # an answer is the same whatever the way
            note(f"{policy}: fleet and undisturbed run after {time.monotonic() - began:.0f} s")
            await suite.check()
            await suite.run(plan, until_s, note)
            transfers.update(await suite.fleet.transfers())
        tally.add(suite.crowd.tally)
        outcomes += suite.outcomes
        found.update(suite.found)
        notes += suite.leaks.found + suite.fleet.crashes
    result = report(tally, outcomes, dict(found), about(args, began))
    result["examples"] += notes[:20]
    result["transfers"] = dict(transfers)  # where one failed, the decode worker computed the prompt
    return result


def note(text: str) -> None:
    print(text, flush=True)


def about(args: argparse.Namespace, began_s: float, more: str = "") -> dict[str, Any]:
    """Where the figures are from."""
    return {
        **origin(f"make chaos SECONDS={args.seconds:g} SEED={args.seed} {more}".rstrip()),
        "arguments": " ".join(itertools.islice(sys.argv, 1, None)),
        "seed": args.seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "clients": args.clients,
    }


if __name__ == "__main__":
    sys.exit(main())

"""`make attack`: every attack on a router of its own, what it cost the router, and what the others noticed.

Beside each attack 16 paced streams run and ten short requests a second. Attackers, probe, workers and router share this
machine. An attacker takes only what everybody else leaves of it, as its own work would not slow the others down if it
had a machine of its own.

An attack shorter than nine seconds is made several times, with a pause before each. What the others saw in all turns
is one sample, and what they saw in all pauses is another.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attack import (
    floods,
    kv_port,
    liars,
    memory,
    processes,
    real_worker,
    strangers,
    templates,
    tenants,
)
from attack.attack import Attack, Outcome, Scale, Trial
from attack.report import TO_A_SINK, Row, medians, percentile, table
from attack.stack import (
    ROOT,
    Programs,
    Stack,
    others_between,
    sink,
    stack,
    status_of,
    with_template,
)
from headrace.models.load.source import resolve
from helpers.origin import origin

MODEL = "attacked"
SLICE_NICE = 15
TURNS_TO_CLOSE = 10


def main() -> int:
    args = arguments()
    attacks = [
        *memory.ATTACKS,
        *templates.ATTACKS,
        *floods.ATTACKS,
        *strangers.ATTACKS,
        *liars.ATTACKS,
    ]
    trials = [*processes.TRIALS, *tenants.TRIALS, *kv_port.TRIALS, *real_worker.TRIALS]
    chosen = [a for a in [*attacks, *trials] if any(part in a.name for part in args.only or [""])]
    if args.list:
        print("\n".join(attack.name for attack in chosen))
        return 0
    programs, scale = Programs.built(args.bin), Scale(args.scale)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="attack-doc-") as name:
        doc = Path(name) / "doc.json"
        doc.write_bytes(resolve(None).doc())
        for attack in chosen * args.runs:  # in turns
            rows.append(told(asyncio.run(one(attack, programs, doc, scale))))
            if args.control and isinstance(attack, Attack) and attack.control is not None:
                rows.append(told(asyncio.run(one(attack, programs, doc, scale, control=True))))
    print(table(rows))
    if args.runs > 1:
        print(medians(rows))
    if args.out:
        write(args, rows)
    return 1 if any(row.broken for row in rows) else 0


def told(row: Row) -> Row:
    """With a line for whoever waits."""
    print(f"{row.name}: {row.status} ({', '.join(row.broken) or 'held'})", file=sys.stderr)
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument(
        "--bin", type=Path, default=ROOT / "target/release", help="folder of the programs"
    )
    parser.add_argument(
        "--only", action="append", help="attacks whose name contains this; may be repeated"
    )
    parser.add_argument("--runs", type=int, default=1, help="of each attack, in turns (default: 1)")
    parser.add_argument(
        "--control",
        action="store_true",
        help="after each attack its bytes sent to a program that only reads, where that can be told apart",
    )
    parser.add_argument("--list", action="store_true", help="name the attacks and do nothing")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the attacks (default: 1)")
    parser.add_argument("--out", type=Path, help="file for the figures")
    return parser.parse_args()


async def one(
    attack: Attack | Trial, programs: Programs, doc: Path, scale: Scale, *, control: bool = False
) -> Row:
    """One attack from a fresh start to its row. A failure of ours is a row too: the others still run."""
    try:
        if isinstance(attack, Trial):
            began = time.monotonic()
            outcome = await attack.run(programs, doc, scale)
            return Row(
                name=attack.name,
                status=outcome.status,
                held=outcome.held,
                seconds=time.monotonic() - began,
            )
        return await under_attack(attack, programs, doc, scale, control=control)
    except (OSError, RuntimeError) as error:
        return Row(
            name=attack.name, status=f"{type(error).__name__}: {error}", held=False, seconds=0.0
        )


async def under_attack(
    attack: Attack, programs: Programs, doc: Path, scale: Scale, *, control: bool
) -> Row:
    """The attack on a router of its own, or beside it."""
    doc = doc if attack.template is None else with_template(doc, attack.template)
    async with stack(programs, MODEL, doc, attack.flags, wrapper=attack.prefix) as running:
        if control:
            row = await beside_sink(attack, running, scale)
        else:
            row = await beside_probe(attack, running, scale)
        stopped_s = await asyncio.to_thread(running.router.end)
    if stopped_s is None:
        return dataclasses.replace(row, held=False, status=f"{row.status}; SIGTERM did not end it")
    return row


async def beside_sink(attack: Attack, running: Stack, scale: Scale) -> Row:
    """The same bytes to a program that only reads: what others notice then is the machine's and the attacker's."""
    assert attack.control is not None
    with sink(running.folder) as reads:
        aside = dataclasses.replace(running, router=reads)
        row = await beside_probe(
            dataclasses.replace(attack, run=attack.control), running, scale, target=aside
        )
    # what it answers means nothing
    return dataclasses.replace(row, name=f"{attack.name} {TO_A_SINK}", held=True)


async def beside_probe(
    attack: Attack, running: Stack, scale: Scale, target: Stack | None = None
) -> Row:
    """The attack on a router that runs, with the others beside it."""
    router = running.router
    running.begin_probe()
    await asyncio.sleep(min(scale.quiet_s, 1.0))
    quiet = time.monotonic()
    await asyncio.sleep(scale.quiet_s)
    rest_mb, router.peak_mb = router.rss_mb, router.rss_mb
    turns = [await turn(attack, target or running, scale, quiet)]
    while sum(one.over - one.began for one in turns) < scale.enough_s:
        quiet = time.monotonic()
        await asyncio.sleep(scale.quiet_s)
        turns.append(await turn(attack, target or running, scale, quiet))
    await asyncio.sleep(scale.rest_s)
    health = await asyncio.to_thread(status_of, router, "/health")
    after_mb = router.rss_mb
    seen = await asyncio.to_thread(running.end_probe)
    before = others_between(seen, [(one.quiet, one.began) for one in turns])
    during = others_between(seen, [(one.began, one.over) for one in turns])
    worst = min(turns, key=lambda one: one.outcome.held)
    held, status = worst.outcome.held, worst.outcome.status
    if health != "200":
        held, status = False, f"{status}; /health then: {health}"
    if during.failures:
        status = f"{status}; others: {len(during.failures)} x {during.failures[0]}"
    return Row(
        name=attack.name,
        status=status,
        held=held,
        seconds=max(one.ended - one.began for one in turns),
        turns=len(turns),
        rest_mb=rest_mb,
        peak_mb=router.peak_mb,
        after_mb=after_mb,
        most_mb=attack.most_mb,
        itl_before=percentile(before.gaps_ms, 0.99),
        itl=percentile(during.gaps_ms, 0.99),
        first_before=percentile(before.firsts_ms, 0.99),
        first=percentile(during.firsts_ms, 0.99),
        tokens=len(during.gaps_ms),
        others_failed=len(during.failures),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """An attack, made once: when the pause before it began, when it began and ended, and when its window did."""

    quiet: float
    began: float
    ended: float
    over: float
    outcome: Outcome


async def turn(attack: Attack, target: Stack, scale: Scale, quiet: float) -> Turn:
    """The attack, now, and the rest of its window."""
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as attacker:  # its priority goes with it
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(attacker, from_afar, attack, target, scale)
    ended = time.monotonic()
    await asyncio.sleep(max(scale.least_s - (ended - began), 0.0))
    return Turn(quiet, began, ended, time.monotonic(), outcome)


def from_afar(attack: Attack, running: Stack, scale: Scale) -> Outcome:
    """The attack, on a thread that gets only what others leave of the cores, where a thread can have its own priority.
    With more it would finish its slice of some milliseconds before whoever wakes up gets the core."""
    if sys.platform == "linux":
        me = threading.get_native_id()
        if scale.alone:
            os.sched_setscheduler(me, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, me, SLICE_NICE)

    async def whole() -> Outcome:
        outcome = await attack.run(running, scale)
        for _ in range(TURNS_TO_CLOSE):
            await asyncio.sleep(0)  # transports that were closed are told so by the loop
        return outcome

    return asyncio.run(whole())


def figures(row: Row) -> dict[str, Any]:
    """As JSON, which has no NaN."""
    values = dataclasses.asdict(row) | {"broken": row.broken}
    cut = {name: round(v, 2) for name, v in values.items() if isinstance(v, float) and v == v}
    return {name: cut.get(name) if isinstance(v, float) else v for name, v in values.items()}


def write(args: argparse.Namespace, rows: list[Row]) -> None:
    """Keep the figures, with machine and commit."""
    words = [f'--only "{part}"' for part in args.only or []]
    words += [f"--runs {args.runs}"] if args.runs > 1 else []
    words += ["--control"] if args.control else []
    given = f" ARGS='{' '.join(words)}'" if words else ""
    result: dict[str, Any] = {
        **origin(f"make attack OUT={args.out}{given}"),
        "rows": [figures(row) for row in rows],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

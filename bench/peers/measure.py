"""One run: a load against a fresh router with fresh workers, and what it took."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.helpers.clients import LoadFailedError, merged, reports
from bench.helpers.fleet import ProcessDiedError
from bench.peers.cases import PREFIXES, REQUESTS_OF_A_CLIENT, STALLED_TOKENS, Case
from bench.peers.processes import Watch, cpu_s, machine_cpu_s, resident_mib, wait_until_quiet
from bench.peers.systems import MODEL, Running, System, running

RUN_LIMIT_S = 400.0
SETTLE_LIMIT_S = 180.0
PORTS_OF_AN_ADDRESS = 25_000
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs have in common."""

    bench: Sequence[str | Path]  # the command of the clients
    seconds: float
    seed: int


@dataclass(kw_only=True)
class Run:
    """What one run gave. A run without figures says why."""

    peer: str
    case: str
    round: int
    note: str | None = None
    why_not: str | None = None
    figures: Figures = field(default_factory=dict)


def why_not(system: System, case: Case) -> str | None:
    """Why a case cannot run here: a process may have only so many descriptors, and not every root may raise that."""
    client = case.parts(system.clients(case))[0]
    needed = max(system.descriptors(case), client.descriptors(1))
    if needed > system.limit:
        return (
            f"needs {needed:,} descriptors in one process; here a process may have {system.limit:,}"
        )
    return None


def note(system: System, case: Case) -> str | None:
    """What is particular about a run."""
    count = system.clients(case)
    parts = [system.note(case), f"{count} clients" if count > 1 else None]
    return ", ".join(part for part in parts if part is not None) or None


def one_run(system: System, case: Case, number: int, setting: Setting) -> Run:
    """A run, or why there is none. A router that dies or serves nothing is a result, too."""
    run = Run(peer=system.name, case=case.name, round=number, note=note(system, case))
    run.why_not = why_not(system, case)
    if run.why_not is not None:
        return run
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as name:
        try:
            with running(system, case, Path(name)) as stack:
                run.figures = measured(stack, case, setting)
        except (ProcessDiedError, LoadFailedError, subprocess.TimeoutExpired) as error:
            run.why_not = str(error)[:600]
    return run


def load(address: str, flags: Sequence[str], setting: Setting) -> list[str | Path]:
    """The command of one `bench load`."""
    command = [*setting.bench, "load", "--json", "-", "--target", address, "--model", MODEL]
    return [*command, "--seed", str(setting.seed), "--timeout-s", "300", *flags]


def loads(
    stack: Running, case: Case, setting: Setting, more: Sequence[str]
) -> list[list[str | Path]]:
    """The commands of all clients, which together are the load of a case. No two send the same prompt."""
    commands: list[list[str | Path]] = []
    parts = case.parts(len(stack.addresses))
    for number, (address, part) in enumerate(zip(stack.addresses, parts, strict=True)):
        first = ["--first", str(number * REQUESTS_OF_A_CLIENT)] if number else []
        flags = [*part.flags(setting.seconds), *sources(part.streams), *first, *more]
        commands.append(load(address, flags, setting))
    return commands


def sources(streams: int) -> list[str]:
    """Local addresses for so many connections: one has not ports enough for all."""
    if streams <= PORTS_OF_AN_ADDRESS:
        return []
    addresses = math.ceil(streams / PORTS_OF_AN_ADDRESS)
    return [flag for i in range(addresses) for flag in ("--source", f"127.0.0.{i + 1}")]


def measured(stack: Running, case: Case, setting: Setting) -> Figures:
    """Warm up, and run the load."""
    shared = ["--shared-prefix", str(case.shared), "--prefixes", str(PREFIXES)]
    # three of each shared beginning on average, so that caches have what they can
    warm = ["-n", str(3 * PREFIXES), *shared] if case.shared else ["-n", "100"]
    one_token = ["--first", "1000000000", "-c", "8", "--max-tokens", "1", "--unary", "--chat"]
    for address in stack.addresses:
        reports([load(address, [*warm, *one_token], setting)], RUN_LIMIT_S)
    idle_mib = resident_mib(stack.router or stack.workers)
    if not case.stalled:
        return under_load(stack, case, setting, idle_mib)
    command = [*setting.bench, "stalled", "--target", stack.addresses[0], "--model", MODEL]
    command += ["--streams", str(case.stalled), "--max-tokens", str(STALLED_TOKENS)]
    command += sources(case.stalled)
    stalled = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert stalled.stdout is not None
        stalled.stdout.readline()  # as many have begun as will
        settled = wait_until_quiet([*stack.router, *stack.workers], SETTLE_LIMIT_S)
        figures = under_load(stack, case, setting, idle_mib)
        said, _ = stalled.communicate(timeout=RUN_LIMIT_S)
    finally:
        stalled.kill()
        stalled.wait()
    return {**figures, "settled": settled, "stalled": json.loads(said)}


def under_load(stack: Running, case: Case, setting: Setting, idle_mib: float) -> Figures:
    """The load of a case, with what the processes used for it."""
    processes = [*stack.router, *stack.workers]
    pids = ["--pids", ",".join(map(str, processes))]
    before = machine_cpu_s() - ours(processes)
    with Watch(stack.router or stack.workers) as watch:
        report = merged(reports(loads(stack, case, setting, pids), RUN_LIMIT_S))
    other_s = machine_cpu_s() - ours(processes) - before
    split = len(stack.router)
    return figures(case, report, split) | {
        "clients": len(stack.addresses),
        "rss_idle_mib": idle_mib,
        "rss_peak_mib": watch.peak_mib,
        "rss_kib_a_stream": (watch.peak_mib - idle_mib) * 1024 / case.open_streams,
        "other_cores": other_s / report["wall_s"],
    }


def ours(processes: list[int]) -> float:
    """CPU seconds of the stack, of clients that have ended, and of this process."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return cpu_s(processes) + sum(usage.ru_utime + usage.ru_stime for usage in used)


def per(seconds: float | None, count: float) -> float | None:
    """Microseconds for each, where there are any."""
    return seconds * 1e6 / count if seconds is not None and count else None


def figures(case: Case, report: Figures, router_processes: int) -> Figures:
    """Of a report of `bench load`, whose `cpu_s` has the router's processes first."""
    answered = report["requests"] - report["errors"]
    events = 0 if case.unary else report["chunks"]
    # usage may be missing from an answer; then the answer was as long as it was to be
    tokens = report["completion_tokens"] or answered * case.max_tokens
    # without a router there is nothing to tell, which is not 0
    router_s = sum(report["cpu_s"][:router_processes]) if router_processes else None
    worker_s = sum(report["cpu_s"][router_processes:])

    def quantile(name: str, which: str) -> float | None:
        return report[name][which] if report.get(name) else None

    return {
        "requests": report["requests"],
        "errors": report["errors"],
        "errors_by_kind": report["errors_by_kind"],
        "requests_per_s": report["requests_per_s"],
        "tokens_per_s": tokens / report["wall_s"],
        "events_a_token": events / tokens if events and tokens else None,
        "router_us_a_request": per(router_s, answered),
        "router_us_a_token": per(router_s, tokens),
        "router_us_an_event": per(router_s, events),
        "worker_us_a_request": per(worker_s, answered),
        "worker_us_a_token": per(worker_s, tokens),
        "router_cores": router_s / report["wall_s"] if router_s is not None else None,
        "worker_cores": worker_s / report["wall_s"],
        "client_cores": report["client_cpu_share"],
        "ttft_p50_ms": quantile("ttft_ms", "p50"),
        "ttft_p99_ms": quantile("ttft_ms", "p99"),
        "itl_p50_ms": quantile("itl_ms", "p50"),
        "itl_p99_ms": quantile("itl_ms", "p99"),
        "late_p50_ms": quantile("late_ms", "p50"),
        "late_p99_ms": quantile("late_ms", "p99"),
        "hit_rate": report["token_hit_rate"],
    }

"""Clients that put load on a router at the same time, each a process, and what their reports say together."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAST_BYTES = 500
QUANTILES = ("p50", "p99")
Report = dict[str, Any]


class LoadFailedError(Exception):
    """A client could not run its load, or nothing was answered."""


def reports(commands: Sequence[Sequence[str | Path]], limit_s: float) -> list[Report]:
    """What each `bench load` reports; all run at once. A client without any answer has a report where others have some.

    Raises LoadFailedError, and `subprocess.TimeoutExpired` when the time is over.
    """
    pipe = subprocess.PIPE
    deadline = time.monotonic() + limit_s
    clients: list[subprocess.Popen[str]] = []
    try:
        clients.extend(
            subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands
        )
        said = [client.communicate(timeout=deadline - time.monotonic()) for client in clients]
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
                client.communicate()
    without_report = [error for out, error in said if not out]
    if without_report or all(client.returncode != 0 for client in clients):
        errors = without_report or [error for _, error in said]
        raise LoadFailedError(errors[0].strip()[-LAST_BYTES:])
    return [json.loads(out) for out, _ in said]


def merged(parts: Sequence[Report]) -> Report:
    """One report of clients that began together, all watching the same processes.

    Counts and CPU times of clients add up, rates are over the longest run, and a quantile is the worst of theirs.
    """
    if len(parts) == 1:
        return parts[0]
    wall_s = max(part["wall_s"] for part in parts)
    errors_by_kind: Counter[str] = Counter()
    for part in parts:
        errors_by_kind.update(part["errors_by_kind"])
    counts = ["requests", "errors", "chunks", "prompt_tokens", "completion_tokens"]
    sums = {name: sum(part[name] for part in parts) for name in counts}
    cached = [part["cached_tokens"] for part in parts if part["cached_tokens"] is not None]
    client_cpu = [part["client_cpu_s"] for part in parts if part["client_cpu_s"] is not None]
    return {
        **sums,
        "errors_by_kind": dict(errors_by_kind),
        "wall_s": wall_s,
        "requests_per_s": (sums["requests"] - sums["errors"]) / wall_s,
        "tokens_per_s": sums["completion_tokens"] / wall_s,
        "cached_tokens": sum(cached) if cached else None,
        "token_hit_rate": sum(cached) / max(1, sums["prompt_tokens"]) if cached else None,
        "client_cpu_s": sum(client_cpu) if client_cpu else None,
        "client_cpu_share": sum(client_cpu) / wall_s if client_cpu else None,
        # of the same processes: the look that lasted longest has what the others have
        "cpu_s": [max(looks) for looks in zip(*(part["cpu_s"] for part in parts), strict=True)],
        "ttft_ms": worst([part["ttft_ms"] for part in parts]),
        "itl_ms": worst([part["itl_ms"] for part in parts]),
        "late_ms": worst([part.get("late_ms") for part in parts]),
    }


def worst(quantiles: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """Of clients that have any. A quantile of all samples is at most the greatest of the parts' own."""
    known = [found for found in quantiles if found is not None]
    return {which: max(found[which] for found in known) for which in QUANTILES} if known else None

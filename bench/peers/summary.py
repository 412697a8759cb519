"""What many runs say: medians with their extremes, and what a router adds to the same load without one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

# Of each, what a router adds, within one round: the machine is not the same in the next.
ADDED = ["ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"]
BASELINE = "direct"
CLIENT_IS_LIMIT = 0.8  # cores; above it the client may be what was measured
Row = dict[str, Any]


def spread(values: Iterable[float | None]) -> list[float] | None:
    """Median, least and greatest; `None` where nothing was measured."""
    known = sorted(value for value in values if value is not None)
    return [statistics.median(known), known[0], known[-1]] if known else None


def numbers(runs: list[Row]) -> dict[str, list[float]]:
    """The spread of every figure that is a number."""
    names = {name for run in runs for name, value in run["figures"].items() if is_number(value)}
    found = {name: spread(run["figures"].get(name) for run in runs) for name in sorted(names)}
    return {name: value for name, value in found.items() if value is not None}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def added(runs: list[Row], baseline: list[Row]) -> dict[str, list[float]]:
    """What each round's run has more than the run without a router of the same round."""
    without = {run["round"]: run["figures"] for run in baseline}
    found: dict[str, list[float]] = {}
    for name in ADDED:
        pairs = [
            (run["figures"].get(name), without.get(run["round"], {}).get(name)) for run in runs
        ]
        more = spread(a - b for a, b in pairs if a is not None and b is not None)
        if more is not None:
            found[f"added_{name}"] = more
    return found


def summary(runs: list[Row], own_engines: set[str]) -> list[Row]:
    """One row for each case and peer, in the order in which they first ran."""
    keys = list(dict.fromkeys((run["case"], run["peer"]) for run in runs))
    rows: list[Row] = []
    for case, peer in keys:
        mine = [run for run in runs if (run["case"], run["peer"]) == (case, peer)]
        done = [run for run in mine if run["figures"]]
        row: Row = {"case": case, "peer": peer, "runs": len(done), "note": mine[0]["note"]}
        why_not = sorted({run["why_not"] for run in mine if run["why_not"]})
        row["why_not"] = why_not or None
        row["figures"] = numbers(done)
        row["errors"] = sum(run["figures"]["errors"] for run in done)
        row["client_is_limit"] = any(
            (run["figures"]["client_cores"] or 0) > CLIENT_IS_LIMIT for run in done
        )
        if peer != BASELINE and peer not in own_engines:
            baseline = [run for run in runs if (run["case"], run["peer"]) == (case, BASELINE)]
            row["figures"] |= added(done, [run for run in baseline if run["figures"]])
        rows.append(row)
    return rows

"""The matrix, and the figures that decide. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from chaos.crowd import Tally
from chaos.faults import Outcome
from chaos.plan import KINDS, place

DECIDING = ("mismatched", "failed", "hung", "leaked_blocks", "leaked_bookings", "crashed")


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(math.ceil(share * len(ordered)) - 1, 0)], 1)


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "count": len(values),
    }


def report(
    tally: Tally, outcomes: Sequence[Outcome], leaks: dict[str, int], about: dict[str, Any]
) -> dict[str, Any]:
    """What goes into the file."""
    killed = [o for o in outcomes if o.fault.kind == "kill" and o.fault.role in ("decode", "both")]
    recoveries = [recovery for outcome in killed for recovery in outcome.recoveries]
    everything = [recovery for outcome in outcomes for recovery in outcome.recoveries]
    cancels = [o.cancel_to_free_ms for o in outcomes if o.cancel_to_free_ms is not None]
    noticed = [o.noticed_ms for o in outcomes if o.noticed_ms is not None]
    return {
        **about,
        "requests": tally.requests,
        "equal": tally.equal,
        "hung_up": tally.hung_up,
        "mismatched": len(tally.mismatched),
        "failed": len(tally.failed),
        "hung": len(tally.hung),
        **leaks,
        "faults": sum(outcome.reached for outcome in outcomes),
        "faults_not_recovered": sum(bool(outcome.error) for outcome in outcomes),
        # from SIGKILL of a worker that decodes to the next token of its streams, without recomputing
        "recovery_ms": spread([recovery.ms for recovery in recoveries]),
        "recovery_with_prefill_ms": spread([recovery.total_ms for recovery in recoveries]),
        "recomputed_prefill_ms": spread([recovery.prefill_ms for recovery in recoveries]),
        "recovery_from_any_fault_ms": spread([recovery.ms for recovery in everything]),
        "freeze_noticed_ms": spread(noticed),
        "cancel_to_free_ms": spread(cancels),
        "matrix": cells(outcomes),
        "injected": [
            {
                "at_s": round(outcome.at_s - outcomes[0].at_s, 2),
                "role": outcome.fault.role,
                "fault": outcome.fault.kind,
                "point": outcome.fault.point,
                "outcome": outcome.word,
            }
            for outcome in outcomes
            if outcome.reached
        ],
        "examples": (tally.mismatched + tally.failed + tally.hung)[:20],
    }


def passed(result: dict[str, Any]) -> bool:
    return all(result[name] == 0 for name in DECIDING)


def cells(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One entry for each fault at each point, in the order in which they came first."""
    grouped: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        fault = outcome.fault
        grouped[fault.role, fault.kind, fault.point].append(outcome)
    found: list[dict[str, Any]] = []
    for (role, kind, point), group in grouped.items():
        times = [r.ms for outcome in group for r in outcome.recoveries]
        times += [o.cancel_to_free_ms for o in group if o.cancel_to_free_ms is not None]
        words = [outcome.word for outcome in group]
        bad = [word for word in words if word not in ("ok", "not reached")]
        found.append(
            {
                "role": role,
                "fault": kind,
                "point": point,
                "injected": sum(outcome.reached for outcome in group),
                "outcome": bad[0] if bad else "ok" if "ok" in words else "not reached",
                "ms": {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)},
            }
        )
    return found


def table(matrix: list[dict[str, Any]]) -> str:
    """For each role points down, faults across: how often it was injected, and the median ms to recover."""
    roles = sorted({cell["role"] for cell in matrix})
    return "\n\n".join(_table(role, [c for c in matrix if c["role"] == role]) for role in roles)


def _table(role: str, matrix: list[dict[str, Any]]) -> str:
    faults = [kind for kind in KINDS if any(cell["fault"] == kind for cell in matrix)]
    points = sorted({cell["point"] for cell in matrix}, key=place)
    found = {(cell["fault"], cell["point"]): cell for cell in matrix}
    rows = [[role, *faults]]
    rows += [[point, *(_cell(found.get((fault, point))) for fault in faults)] for point in points]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["outcome"] == "not reached":
        return "-"
    word = "ok" if cell["outcome"] == "ok" else "BAD"
    ms = cell["ms"]["p50"]
    return f"{cell['injected']} {word}" + ("" if ms is None else f" {ms:.0f} ms")


def summary(result: dict[str, Any]) -> str:
    """The lines below the matrix."""
    names = ("requests", "equal", "hung_up", *DECIDING, "faults", "faults_not_recovered")
    lines = [", ".join(f"{name} {result[name]}" for name in names)]
    for name in (
        "recovery_ms",
        "recomputed_prefill_ms",
        "recovery_with_prefill_ms",
        "freeze_noticed_ms",
        "cancel_to_free_ms",
    ):
        values = result[name]
        lines.append(f"{name}: p50 {values['p50']}, p99 {values['p99']} ({values['count']} seen)")
    lines += [
        f"{cell['role']}, {cell['fault']} at {cell['point']}: {cell['outcome']}"
        for cell in result["matrix"]
        if cell["outcome"] not in ("ok", "not reached")
    ]
    return "\n".join([*lines, *result["examples"]])

"""The arithmetic of budgets: what one more costs, what that may be, and what is over it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.budget.counts import Counts

# How far a count may grow, as a share and as a number: what is counted depends a little on when threads meet.
MARGINS: dict[str, tuple[float, float]] = {
    "instructions": (0.10, 0.0),
    "allocations": (0.05, 0.1),
    "atomics": (0.15, 0.5),
    "syscalls": (0.25, 0.2),
    "futexes": (0.50, 0.2),
}
TARGETS: dict[tuple[str, str], float] = {
    ("token", "instructions"): 5_000,
    ("short_chat", "instructions"): 250_000,
}


@dataclass(frozen=True)
class Line:
    """One count of one case beside what it may be."""

    case: str
    count: str
    measured: float | None  # None where nothing could count it
    budget: float | None  # None where the file has none
    target: float | None

    @property
    def is_over(self) -> bool:
        return None not in (self.measured, self.budget) and self.measured > self.budget  # pyright: ignore[reportOperatorIssue]


def each(few: Counts, many: Counts, units: int) -> Counts:
    """What one more unit costs: start and end are in both runs, and cancel."""
    if units <= 0:
        raise ValueError(f"{units} units between two runs")
    return {count: (many[count] - few[count]) / units for count in few}


def middle(measured: Sequence[Counts]) -> Counts:
    """The median of each count."""
    return {count: median(one[count] for one in measured) for count in measured[0]}


def budget_of(count: str, measured: float) -> float:
    """What a count may be, for what it is."""
    share, number = MARGINS[count]
    return max(measured, 0.0) * (1 + share) + number


def lines(measured: dict[str, Counts], budgets: dict[str, dict[str, Any]]) -> list[Line]:
    """All counts that were measured or have a budget."""
    found: list[Line] = []
    for case in dict.fromkeys([*measured, *budgets]):
        now, then = measured.get(case, {}), budgets.get(case, {})
        for count in MARGINS:
            if count in now or count in then:
                budget = then[count]["budget"] if count in then else None
                target = TARGETS.get((case, count))
                found.append(Line(case, count, now.get(count), budget, target))
    return found


def over(found: list[Line]) -> list[str]:
    """What is over its budget, in words."""
    return [
        f"{line.case}: {shown(line.measured)} {line.count}, the budget is {shown(line.budget)}"
        for line in found
        if line.is_over
    ]


def verdict(found: list[Line], budgets: dict[str, dict[str, Any]]) -> list[str]:
    """Why a check fails, in words; empty where it passes. Nothing to hold counts to is no pass."""
    without = [line for line in found if line.measured is not None and line.budget is None]
    if not budgets:
        return ["there are no budgets; `python -m bench.budget --write` makes them"]
    named = [f"{line.case}: {line.count} has no budget" for line in without]
    return named + over(found)


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def table(found: list[Line], cases: dict[str, str]) -> str:
    """As Markdown, for a terminal and for a page."""
    text = ["| case | count | measured | budget | target |", "|---|---|---|---|---|"]
    for line in found:
        measured = shown(line.measured) + (" **over**" if line.is_over else "")
        what = cases.get(line.case, line.case)
        text.append(
            f"| {what} | {line.count} | {measured} | {shown(line.budget)} | {shown(line.target)} |"
        )
    return "\n".join(text)


def written(measured: dict[str, Counts], origin: dict[str, Any]) -> str:
    """The file of budgets for what was measured."""
    margins = ", ".join(
        f"{count} {share:.0%} and {number:g}" for count, (share, number) in MARGINS.items()
    )
    text = [
        "# What the router may use for one more of each case; `make bench-budget` fails above it.",
        "# Made by `python -m bench.budget --write` from what was measured, with these margins:",
        f"# {margins}.",
        f"commit = {json.dumps(origin['commit'])}",
        f"processor = {json.dumps(origin['machine']['processor'])}",
    ]
    for case, counts in measured.items():
        text += ["", f"[{case}]"]
        for count, value in counts.items():
            budget = budget_of(count, value)
            text.append(f"{count} = {{ measured = {digits(value)}, budget = {digits(budget)} }}")
    return "\n".join(text) + "\n"


def page(text: str, cases: dict[str, str]) -> str:
    """The part of the documents about a file of budgets."""
    budgets = read(text)
    measured = {
        case: {count: part["measured"] for count, part in counts.items()}
        for case, counts in budgets.items()
    }
    origin = tomllib.loads(text)
    beginning = f"Commit {origin['commit']}, {origin['processor']}."
    return f"{beginning}\n\n{table(lines(measured, budgets), cases)}\n"


def digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def read(text: str) -> dict[str, dict[str, Any]]:
    """The cases of a file of budgets."""
    return {name: part for name, part in tomllib.loads(text).items() if isinstance(part, dict)}

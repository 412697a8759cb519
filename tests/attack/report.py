"""What an attack cost, as a row; the table of all rows; the verdict. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ITL_GROWTH = 1.2  # of others, p99
TO_A_SINK = "(to a program that only reads)"
FIRST_TOKEN_MS = 100.0  # later for others, p99


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An attack, done. Times of others are p99 in ms, before and during the attack; NaN where nobody watched."""

    name: str
    status: str
    held: bool
    seconds: float
    rest_mb: float = math.nan
    peak_mb: float = math.nan
    after_mb: float = math.nan
    most_mb: float = math.nan
    itl_before: float = math.nan
    itl: float = math.nan
    first_before: float = math.nan
    first: float = math.nan
    others_failed: int = 0
    turns: int = 1  # times that it was made
    tokens: int = 0  # of others in these turns: so many are behind `itl`

    @property
    def broken(self) -> list[str]:
        """Which of the promises was broken."""
        found: list[str] = []
        if not self.held:
            found.append("status")
        if self.peak_mb - self.rest_mb > self.most_mb:
            found.append("memory")
        watched = not math.isnan(self.first_before)  # then no figure at all is the worst one
        if watched and not self.itl <= ITL_GROWTH * self.itl_before:
            found.append("ITL")
        if watched and not self.first <= self.first_before + FIRST_TOKEN_MS:
            found.append("first token")
        if self.others_failed:
            found.append("others")
        return found


HEAD = (
    "attack",
    "status",
    "times x s",
    "RSS before, peak, after MB",
    "others' ITL p99 ms",
    "others' first token p99 ms",
    "broken",
)


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        cells = (
            row.name,
            row.status,
            f"{row.turns} x {row.seconds:.1f}" if row.turns > 1 else f"{row.seconds:.1f}",
            numbers(row.rest_mb, row.peak_mb, row.after_mb, sign=", "),
            numbers(row.itl_before, row.itl, sign=" -> "),
            numbers(row.first_before, row.first, sign=" -> "),
            ", ".join(row.broken) or "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def medians(rows: Sequence[Row]) -> str:
    """Of the runs of each row: others' p99 during the attack over that before it, as Markdown."""
    lines = [
        "| attack | runs | others' ITL p99 ms | during / before, each | median |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        runs = [row for row in rows if row.name == name and not math.isnan(row.itl_before)]
        if not runs:
            continue
        ratios = [row.itl / row.itl_before for row in runs]
        each = ", ".join(numbers(row.itl_before, row.itl, sign=" -> ") for row in runs)
        cells = (name, str(len(runs)), each, ", ".join(f"{ratio:.2f}" for ratio in ratios))
        lines.append("| " + " | ".join((*cells, f"{statistics.median(ratios):.2f}")) + " |")
    return "\n".join(lines)


def numbers(*values: float, sign: str) -> str:
    return "" if all(map(math.isnan, values)) else sign.join(f"{value:.0f}" for value in values)

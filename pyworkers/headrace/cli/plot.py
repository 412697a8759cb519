"""`headrace bench plot`: pictures of what `bench load`, `bench replay` and `sim` wrote as JSON.

One picture each of: the distribution of the time to first token, the share of prompt tokens found in caches over time,
and, where a policy was run at several loads, goodput and time to first token over the load.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.supervise import EXIT_CONFIG, EXIT_USAGE

Report = dict[str, Any]
# Okabe and Ito's palette, which people with any colour vision can tell apart.
COLOURS = {
    "kv": "#0072B2",
    "round-robin": "#D55E00",
    "least-loaded": "#009E73",
    "power-of-two": "#E69F00",
    "session-hash": "#CC79A7",
}
OTHER_COLOURS = ["#56B4E9", "#000000", "#F0E442", "#7F7F7F"]


class PlotError(Exception):
    """A file that holds no reports, or nothing to draw. One line for a person."""


@dataclass(slots=True)
class ReportGroup:
    """Reports that belong into the same pictures: one trace, one mode."""

    title: str
    name: str
    reports: list[Report]

    @property
    def is_sweep(self) -> bool:
        """True where a policy was run at several loads."""
        labels = [_label(report) for report in self.reports]
        return len(set(labels)) < len(labels)


def run(arguments: Sequence[str]) -> int:
    """Draw what the arguments ask for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="headrace bench plot",
        description="Draw reports of `bench load`, `bench replay`, `sim` and `make bench-routing`.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports, as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR|FILE.png",
        help="a folder for one picture each, or one file for all of them",
    )
    args = parser.parse_args(arguments)
    try:
        reports = [report for file in args.files for report in read(file)]
        for picture in draw(reports, args.out):
            print(picture)
    except PlotError as error:
        print(f"headrace bench plot: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        print(f"headrace bench plot: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def read(file: Path) -> list[Report]:
    """The reports of one file, a list of them or a single one. Raises PlotError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlotError(f"{file}: {error}") from error
    reports: list[Any] = content if isinstance(content, list) else [content]
    for report in reports:
        if not isinstance(report, dict) or "requests" not in report:
            raise PlotError(f"{file}: neither a report nor a list of reports")
    if len(reports) == 1 and not reports[0].get("policy"):
        reports[0]["policy"] = file.stem  # a run without a name is called after its file
    return reports


def draw(reports: Sequence[Report], out: Path) -> list[Path]:
    """Write the pictures and return their files. Raises PlotError, or ModuleNotFoundError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "matplotlib is missing; install what benchmarks need: pip install 'headrace[bench]'"
        )
    panels = [panel for group in _groups(reports) for panel in _panels(group)]
    if not panels:
        raise PlotError("the reports hold nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def save(chosen: list[tuple[str, Callable[[Any], None]]], file: Path) -> Path:
        columns = min(len(chosen), 2)
        rows = -(-len(chosen) // columns)
        figure = Figure(figsize=(7.5 * columns, 4.8 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for i, (_, paint) in enumerate(chosen):
            paint(figure.add_subplot(rows, columns, i + 1))
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=80)
        return file

    if out.suffix == ".png":
        return [save(panels, out)]
    return [save([panel], out / f"{panel[0]}.png") for panel in panels]


def _groups(reports: Sequence[Report]) -> list[ReportGroup]:
    groups: dict[tuple[str, ...], ReportGroup] = {}
    for report in reports:
        parts = tuple(str(report.get(part) or "") for part in ("trace", "mode", "scope"))
        title = " · ".join(part for part in parts if part)
        name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(part for part in parts if part))
        groups.setdefault(parts, ReportGroup(title, name or "load", [])).reports.append(report)
    return list(groups.values())


def _panels(group: ReportGroup) -> list[tuple[str, Callable[[Any], None]]]:
    """Names of pictures and what paints them."""
    panels: list[tuple[str, Callable[[Any], None]]] = []

    def add(name: str, paint: Callable[[Any, ReportGroup], None]) -> None:
        panels.append((f"{group.name}.{name}", lambda axes: paint(axes, group)))

    if group.is_sweep:
        if any(report.get("goodput") for report in group.reports):
            add("goodput", _goodput)
        add("ttft-load", _ttft_over_load)
        return panels
    if any(report.get("ttft_curve_ms") for report in group.reports):
        add("ttft", _ttft_cdf)
    if any(report.get("token_hit_rate") is not None for report in group.reports):
        add("hits", _hit_rate)
    return panels


def _ttft_cdf(axes: Any, group: ReportGroup) -> None:
    for report in group.reports:
        curve = report.get("ttft_curve_ms") or []
        shares = [100 * (i + 1) / len(curve) for i in range(len(curve))]
        axes.plot(curve, shares, **_style(report))
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    _finish(axes, group, "time to first token (ms, log scale)", "requests (%)", "lower right")


def _hit_rate(axes: Any, group: ReportGroup) -> None:
    for report in group.reports:
        bins = report.get("hit_rate_over_time") or []
        found = [100 * b["cached_tokens"] / max(b["prompt_tokens"], 1) for b in bins]
        axes.plot([b["from_s"] for b in bins], found, **_style(report))
    bounds = [report.get("bound_hit_rate") for report in group.reports]
    bound = next((bound for bound in bounds if bound is not None), None)
    if bound is not None:
        axes.axhline(100 * bound, color="#555555", linestyle="--", linewidth=1.2)
        axes.annotate(
            "one cache as large as all, mean",
            (0.01, 100 * bound),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=8,
            color="#555555",
        )
    axes.set_ylim(bottom=0)
    _finish(axes, group, "time of the trace (s)", "prompt tokens found in a cache (%)", "best")


def _goodput(axes: Any, group: ReportGroup) -> None:
    def point(report: Report) -> float | None:
        return (report.get("goodput") or {}).get("per_s")

    _over_load(axes, group, point)
    slo = next(report["goodput"]["slo"] for report in group.reports if report.get("goodput"))
    limits = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in slo.items())
    label = f"requests per second within {limits}"
    _finish(axes, group, "offered requests per second", label, "upper left")


def _ttft_over_load(axes: Any, group: ReportGroup) -> None:
    def point(report: Report) -> float | None:
        return (report.get("ttft_ms") or {}).get("mean")

    _over_load(axes, group, point)
    axes.set_yscale("log")
    label = "mean time to first token (ms, log scale)"
    _finish(axes, group, "offered requests per second", label, "upper left")


def _over_load(axes: Any, group: ReportGroup, value: Callable[[Report], float | None]) -> None:
    lines: dict[str, list[Report]] = {}
    for report in group.reports:
        if report.get("offered_per_s") and value(report) is not None:
            lines.setdefault(_label(report), []).append(report)
    for line in lines.values():
        line.sort(key=lambda report: report["offered_per_s"])
        xs = [report["offered_per_s"] for report in line]
        axes.plot(
            xs, [value(report) for report in line], marker="o", markersize=4, **_style(line[0])
        )


def _label(report: Report) -> str:
    return str(report.get("policy") or "")


def _style(report: Report) -> dict[str, Any]:
    label = _label(report)
    other = OTHER_COLOURS[sum(label.encode()) % len(OTHER_COLOURS)]
    colour = COLOURS.get(label, other)
    return {"label": label, "color": colour, "linewidth": 2.4 if label == "kv" else 1.5}


def _finish(axes: Any, group: ReportGroup, x: str, y: str, legend: str) -> None:
    axes.set_title(group.title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="major", alpha=0.3)
    if any(_label(report) for report in group.reports):
        axes.legend(loc=legend, fontsize=9, framealpha=0.9)

"""`headrace bench plot`: pictures of what `bench load`, `bench replay` and `sim` wrote as JSON.

One picture each of: the distribution of the time to first token, the share of prompt tokens found in caches over time,
and, where a policy was run at several loads, goodput and time to first token over the load. A run alone also shows its
time per token, and its median and its worst percent in figures.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.parser import Parser
from headrace.errors import MissingExtra
from headrace.exit_status import EXIT_CONFIG, EXIT_USAGE
from headrace.extras import needs

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
GREY = "#555555"


class PlotError(Exception):
    """A file that holds no reports, or nothing to draw. One line for a person."""


@dataclass(slots=True)
class ReportGroup:
    """Reports that belong into the same pictures: one trace, one mode."""

    title: str
    name: str
    reports: list[Report]

    @property
    def is_one_run(self) -> bool:
        """True for a run that is compared with no other."""
        return len(self.reports) == 1

    @property
    def is_sweep(self) -> bool:
        """True where a policy was run at several loads."""
        labels = [_label(report) for report in self.reports]
        return len(set(labels)) < len(labels)


def run(arguments: Sequence[str]) -> int:
    """Draw what the arguments ask for; the exit status."""
    parser = Parser(
        prog="headrace bench plot",
        description="Draw reports of `bench load`, `bench replay`, `sim` and `make bench-routing`.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports, as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR|FILE.png",
        help="a folder for one picture each, or one file for all of them",
    )
    parser.refuse_unknown(arguments)
    args = parser.parse_args(arguments)
    try:
        reports = [report for file in args.files for report in read(file)]
        for picture in draw(reports, args.out):
            print(picture)
    except PlotError as error:
        print(f"headrace bench plot: {error}", file=sys.stderr)
        return EXIT_USAGE
    except MissingExtra as error:
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
    for report in reports:
        if not report.get("policy"):
            report["policy"] = file.stem  # a run without a name is called after its file
    return reports


def draw(reports: Sequence[Report], out: Path) -> list[Path]:
    """Write the pictures and return their files. Raises PlotError, and MissingExtra without matplotlib."""
    with needs("bench"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    panels = [panel for group in _groups(reports) for panel in _panels(group)]
    if not panels:
        raise PlotError("the reports hold nothing to draw")

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
    if group.is_one_run and group.reports[0].get("tpot_curve_ms"):
        add("tpot", _tpot_cdf)
    # one line along 0 says no more than its absence
    if any(report.get("hit_rate_over_time") for report in group.reports) and not (
        group.is_one_run and not group.reports[0].get("cached_tokens", 1)
    ):
        add("hits", _hit_rate)
    return panels


def _ttft_cdf(axes: Any, group: ReportGroup) -> None:
    _cdf(axes, group, "ttft_curve_ms", "ttft_ms")
    labels = "time to first token (ms, log scale)", "requests that had it by then (%)"
    _finish(axes, group, "Time to first token", *labels, "lower right")


def _tpot_cdf(axes: Any, group: ReportGroup) -> None:
    _cdf(axes, group, "tpot_curve_ms", "tpot_quantiles_ms")
    labels = "mean time per token of a request (ms, log scale)", "requests that were as fast (%)"
    _finish(axes, group, "Time per token", *labels, "lower right")


def _cdf(axes: Any, group: ReportGroup, curve_key: str, quantiles_key: str) -> None:
    """The share of requests up to each value of a curve, which is sorted; of a run alone two quantiles in figures."""
    for report in group.reports:
        curve = report.get(curve_key) or []
        shares = [100 * (i + 1) / len(curve) for i in range(len(curve))]
        _draw(axes, curve, shares, report)
        if group.is_one_run:
            quantiles = report.get(quantiles_key) or {}
            for percent in (50, 99):
                at = quantiles.get(f"p{percent}")
                if at:  # a log axis has no place for 0
                    _mark(axes, at, percent)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_ylim(0, 102)  # a point at 100 % is seen whole


def _mark(axes: Any, at: float, percent: int) -> None:
    axes.axvline(at, color=GREY, linestyle=":", linewidth=1.2)
    axes.annotate(
        f"p{percent} {at:,.0f} ms" if at >= 100 else f"p{percent} {at:.3g} ms",
        (at, 2),
        xytext=(4 if percent < 90 else -4, 0),
        textcoords="offset points",
        ha="left" if percent < 90 else "right",
        fontsize=9,
        color=GREY,
    )


def _plain_numbers(axis: Any) -> None:
    """Write 0.3, 20 and 1,000 along a log axis rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    def plain(value: float, _place: int | None) -> str:
        return f"{value:,.10g}"

    def nothing(_value: float, _place: int | None) -> str:
        return ""

    low, high = axis.get_view_interval()
    steps = (1, 2, 5) if high / low < 1e3 else (1,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(FuncFormatter(nothing))


def _hit_rate(axes: Any, group: ReportGroup) -> None:
    for report in group.reports:
        bins = report.get("hit_rate_over_time") or []
        found = [100 * b["cached_tokens"] / max(b["prompt_tokens"], 1) for b in bins]
        _draw(axes, [b["from_s"] for b in bins], found, report)
    bounds = [report.get("bound_hit_rate") for report in group.reports]
    bound = next((bound for bound in bounds if bound is not None), None)
    if bound is not None:
        axes.axhline(100 * bound, color=GREY, linestyle="--", linewidth=1.2)
        axes.annotate(
            "one cache as large as all, mean",
            (0.01, 100 * bound),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=8,
            color=GREY,
        )
    axes.set_ylim(bottom=0)
    labels = "time since the start (s)", "prompt tokens found in a cache (%)"
    _finish(axes, group, "Prompt tokens found in caches", *labels, "best")


def _goodput(axes: Any, group: ReportGroup) -> None:
    def point(report: Report) -> float | None:
        return (report.get("goodput") or {}).get("per_s")

    _over_load(axes, group, point)
    slo = next(report["goodput"]["slo"] for report in group.reports if report.get("goodput"))
    limits = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in slo.items())
    labels = "offered requests per second", f"requests per second within {limits}"
    _finish(axes, group, "Goodput", *labels, "upper left")


def _ttft_over_load(axes: Any, group: ReportGroup) -> None:
    def point(report: Report) -> float | None:
        return (report.get("ttft_ms") or {}).get("mean")

    _over_load(axes, group, point)
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    labels = "offered requests per second", "mean time to first token (ms, log scale)"
    _finish(axes, group, "Time to first token over the load", *labels, "upper left")


def _over_load(axes: Any, group: ReportGroup, value: Callable[[Report], float | None]) -> None:
    lines: dict[str, list[Report]] = {}
    for report in group.reports:
        if report.get("offered_per_s") and value(report) is not None:
            lines.setdefault(_label(report), []).append(report)
    for line in lines.values():
        line.sort(key=lambda report: report["offered_per_s"])
        xs = [report["offered_per_s"] for report in line]
        _draw(axes, xs, [value(report) for report in line], line[0], markers=True)


def _draw(
    axes: Any, xs: Sequence[float], ys: Sequence[Any], report: Report, *, markers: bool = False
) -> None:
    """A line; one point alone is drawn as a point, which a line would not show."""
    style = _style(report)
    if len(xs) == 1:
        style |= {"linestyle": "none", "marker": "o", "markersize": 7}
    elif markers:
        style |= {"marker": "o", "markersize": 4}
    if xs:  # a run without any would stand in the legend for nothing
        axes.plot(xs, ys, **style)


def _label(report: Report) -> str:
    return str(report.get("policy") or "")


def _style(report: Report) -> dict[str, Any]:
    label = _label(report)
    other = OTHER_COLOURS[sum(label.encode()) % len(OTHER_COLOURS)]
    colour = COLOURS.get(label, other)
    return {"label": label, "color": colour, "linewidth": 2.4 if label == "kv" else 1.5}


def _finish(axes: Any, group: ReportGroup, what: str, x: str, y: str, legend: str) -> None:
    """Title, names of the axes, legend. A run alone has its name and its number of requests in the title."""
    parts = [what, group.title]
    if group.is_one_run:
        parts += [_label(group.reports[0]), f"{group.reports[0]['requests']:,} requests"]
    axes.set_title(" · ".join(filter(None, parts)), fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[0] and not group.is_one_run:
        axes.legend(loc=legend, fontsize=9, framealpha=0.9)

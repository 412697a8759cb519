"""The picture of `headrace plan`: what a GPU gives at which speed, and how many GPUs each size of groups needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.plot import COLOURS, GREY, OTHER_COLOURS
from headrace.extras import needs
from headrace.planner.fleet.options import DecodeOption, groups_of
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.step import accepted_tokens
from headrace.planner.published import error_range
from headrace.planner.rates import Lengths, rows_that_fit
from headrace.settings.values import SettingsError

if TYPE_CHECKING:
    from headrace.cli.plan import PlanReport

SHOWN_SIZES = (8, 32, 72, 144, 288)
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def draw(report: PlanReport, file: Path) -> None:
    """Raises SettingsError, and MissingExtra without matplotlib."""
    with needs("bench"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(15.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    _rates(figure.add_subplot(1, 2, 1), report)
    _sizes(figure.add_subplot(1, 2, 2), report)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=80)
    except OSError as error:
        raise SettingsError(f"--picture {file}: {error.strerror or error}") from error


def frontier(group: ExpertGroup, lengths: Lengths, accepted: float) -> list[tuple[float, float]]:
    """Tokens a second of one user and of one GPU, with ever more rows, as many as fit."""
    option = DecodeOption(group=group, accepted=accepted)
    most = rows_that_fit(group, lengths)
    tokens_s = [(1e3 / option.row_ms(rows, lengths.context), rows) for rows in ROWS if rows <= most]
    return [(user, user * rows) for user, rows in tokens_s]


def _rates(axes: Any, report: PlanReport) -> None:
    """Without drafts a full line, with the best number of drafts for few rows a broken one."""
    requests = len(report.traffic.requests)
    lengths = Lengths(
        prompt=report.traffic.prompt_tokens / requests,
        answer=report.traffic.answer_tokens / requests,
    )
    acceptance, base = report.choices.acceptance, report.choices.base
    colours = [*COLOURS.values(), *OTHER_COLOURS]
    for colour, plain in zip(colours, groups_of(base, SHOWN_SIZES), strict=False):
        for drafts, style in ((0, "-"), (max(report.choices.drafts), "--")):
            group = replace(plain, drafts=drafts)
            points = frontier(group, lengths, accepted_tokens(drafts, acceptance))
            if points and (drafts or style == "-"):
                label = None if drafts else f"EP{group.ranks}"
                xs, ys = [x for x, _ in points], [y for _, y in points]
                axes.plot(xs, ys, style, color=colour, label=label, linewidth=1.5)
    axes.axvline(1 / report.limits.tpot_s, color=GREY, linestyle=":", linewidth=1.2)
    axes.annotate("tpot", (1 / report.limits.tpot_s, 0.97), **_beside_a_line())
    _finish(
        axes,
        f"Answers of {lengths.answer:,.0f} behind {lengths.prompt:,.0f} tokens · {base.gpu.name}",
        "tokens a second of one user",
        f"tokens a second of one GPU (broken: {max(report.choices.drafts)} drafts)",
    )
    axes.legend(loc="upper right", fontsize=9, framealpha=0.9)


def _sizes(axes: Any, report: PlanReport) -> None:
    """All GPUs with each size of decode groups; the range of the chosen one."""
    pools, prefill = report.plan.others, report.plan.prefill.gpus
    places = range(len(pools))
    axes.bar(places, [prefill] * len(pools), color=COLOURS["power-of-two"], label="prompts")
    for label, chosen, colour in (
        ("answers", False, "#56B4E9"),
        ("answers, chosen", True, COLOURS["kv"]),
    ):
        of_kind = [at for at in places if (pools[at] is report.plan.decode) is chosen]
        heights = [pools[at].gpus for at in of_kind]
        axes.bar(of_kind, heights, bottom=prefill, color=colour, label=label)
    chosen_at = next(at for at in places if pools[at] is report.plan.decode)
    low = report.quick.gpus
    high = report.plan.gpus if report.slow is None else report.slow.gpus
    errors = [[max(report.plan.gpus - low, 0)], [max(high - report.plan.gpus, 0)]]
    axes.errorbar([chosen_at], [report.plan.gpus], yerr=errors, color="black", capsize=5, fmt="o")
    if report.slow is None:
        above_point = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
        axes.annotate("or more", (chosen_at, report.plan.gpus), fontsize=9, **above_point)
    axes.set_xticks(list(places), [_name(pool.option.group) for pool in pools], fontsize=8)
    below, above = error_range()
    _finish(
        axes,
        f"{report.name} · {_limits(report)}",
        "size of decode groups",
        f"GPUs (bar: steps {1 / above:.2f} to {1 / below:.2f} times as long)",
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)


def _name(group: ExpertGroup) -> str:
    return f"EP{group.ranks}\n{group.drafts} drafts"


def _limits(report: PlanReport) -> str:
    limits = report.limits
    return (
        f"{limits.percentile:g} % within ttft {limits.ttft_s:g} s, tpot {1e3 * limits.tpot_s:g} ms"
    )


def _beside_a_line() -> dict[str, Any]:
    return {
        "xycoords": ("data", "axes fraction"),
        "xytext": (4, -4),
        "textcoords": "offset points",
        "fontsize": 9,
        "color": GREY,
    }


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="major", alpha=0.3)

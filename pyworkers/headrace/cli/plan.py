"""`headrace plan`: the fewest GPUs for the traffic of a trace, what a token costs, and how sure that is."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from headrace.planner.errors import PlanError, shown_s
from headrace.planner.fleet.answers import DecodePool
from headrace.planner.fleet.choices import Choices
from headrace.planner.fleet.preset import worker_preset
from headrace.planner.fleet.prompts import PrefillPool, fewest_for_prompts
from headrace.planner.fleet.search import FleetPlan, behind, plan_fleet
from headrace.planner.fleet.traffic import SloLimits, Traffic
from headrace.planner.loads import read_loads
from headrace.planner.model.gpus import GPUS
from headrace.planner.model.group import ExpertGroup
from headrace.planner.model.skew import REDUNDANT, drawn_loads
from headrace.planner.published import error_range
from headrace.planner.trace import RequestTrace, read_trace
from headrace.settings.plan import PlanSettings
from headrace.settings.table import values_of
from headrace.settings.values import SettingsError

ENOUGH_ANSWERS = 5  # one after the other, in a trace that is taken for steady traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan, and the plans if steps are as long as the slow and the quick of the published systems make them."""

    name: str
    trace: RequestTrace
    traffic: Traffic
    limits: SloLimits
    choices: Choices
    price: float
    plan: FleetPlan
    slow: FleetPlan | None  # None: then a limit is out of reach
    slow_prefill: PrefillPool | None
    quick: FleetPlan


def run(args: argparse.Namespace) -> int:
    """Plan, and print the result. Raises FlagError and SettingsError."""
    settings = PlanSettings(**values_of(PlanSettings, args))
    try:
        report = make_report(settings)
    except PlanError as error:
        raise SettingsError(str(error)) from error
    if settings.picture is not None:
        from headrace.cli import plan_picture

        plan_picture.draw(report, settings.picture)
    if settings.preset is not None:
        preset = worker_preset(report.plan.decode.option)
        try:
            settings.preset.write_text(json.dumps(preset, indent=2) + "\n")
        except OSError as error:
            raise SettingsError(f"--preset {settings.preset}: {error.strerror or error}") from error
    print(json.dumps(as_json(report), indent=2) if settings.json else describe(report))
    return 0


def make_report(settings: PlanSettings) -> PlanReport:
    """Raises PlanError and FlagError."""
    path, name, limits, price = settings.needed()
    trace = read_trace(path)
    gpu = GPUS[name]
    base = ExpertGroup(
        gpu=gpu,
        ranks=settings.decode_sizes[0],
        weights=gpu.weights,
        linear=gpu.weights,
        kv=settings.kv,
        redundant=REDUNDANT if settings.rebalanced else 0,
        rebalanced=settings.rebalanced,
        loads=drawn_loads() if settings.expert_loads is None else read_loads(settings.expert_loads),
    )
    choices = Choices(
        base=base,
        acceptance=settings.acceptance,
        prefill_sizes=settings.prefill_sizes,
        decode_sizes=settings.decode_sizes,
        drafts=settings.drafts,
    )
    traffic = Traffic.at_speed(trace.requests, settings.speed, settings.hit_rate)
    plan = plan_fleet(traffic, limits, choices)
    # groups of the same sizes, with steps that are as long beside the model as those of published systems
    sizes = plan.prefill.option.group.ranks, plan.decode.option.group.ranks
    same = replace(choices, prefill_sizes=sizes[:1], decode_sizes=sizes[1:])
    low, high = error_range()
    slow: FleetPlan | None = None
    slow_prefill: PrefillPool | None = None
    with contextlib.suppress(PlanError):
        slow_prefill = fewest_for_prompts(traffic, limits, same, 1 / low)
        slow = behind(slow_prefill, traffic, limits, same, pace=1 / low)
    return PlanReport(
        name=path.name.partition(".")[0],
        trace=trace,
        traffic=traffic,
        limits=limits,
        choices=choices,
        price=price,
        plan=plan,
        slow=slow,
        slow_prefill=slow_prefill,
        quick=plan_fleet(traffic, limits, same, pace=1 / high),
    )


# ---- what a token costs ----


def dollars_per_million(report: PlanReport, gpus: int, tokens: int) -> float:
    """Of GPUs that stand there for the whole trace, over the tokens that they served."""
    hours = report.traffic.span_s / 3600
    return gpus * report.price * hours / tokens * 1e6


def prices(report: PlanReport, plan: FleetPlan) -> dict[str, float]:
    """Prefill's GPUs over prompt tokens, decode's over answer tokens, all over answer tokens."""
    return {
        "input": dollars_per_million(report, plan.prefill.gpus, report.traffic.prompt_tokens),
        "output": dollars_per_million(report, plan.decode.gpus, report.traffic.answer_tokens),
        "all_per_output": dollars_per_million(report, plan.gpus, report.traffic.answer_tokens),
    }


# ---- as JSON ----


def as_json(report: PlanReport) -> dict[str, Any]:
    traffic, limits, group = report.traffic, report.limits, report.choices.base
    low, high = error_range()
    return {
        "model": "DeepSeek-R1",
        "modelled": "nothing here was measured by Headrace",
        "trace": {
            "name": report.name,
            "requests": len(traffic.requests),
            "left_out_too_long": report.trace.too_long,
            "seconds": traffic.span_s,
            "prompt_tokens": traffic.prompt_tokens,
            "answer_tokens": traffic.answer_tokens,
            "hit_rate": traffic.hit_rate,
        },
        "limits": {
            "ttft_s": limits.ttft_s,
            "tpot_s": limits.tpot_s,
            "percentile": limits.percentile,
        },
        "gpu": group.gpu.name,
        "weights": group.weights,
        "kv": group.kv,
        "dollars_per_gpu_hour": report.price,
        "plan": _plan_json(report, report.plan),
        "if_slow": None if report.slow is None else _plan_json(report, report.slow),
        "if_quick": _plan_json(report, report.quick),
        "published_over_modelled": {"p10": low, "p90": high},
        "decode_sizes": [_decode_json(report, pool) for pool in report.plan.others],
    }


def _plan_json(report: PlanReport, plan: FleetPlan) -> dict[str, Any]:
    prefill = plan.prefill
    return {
        "gpus": plan.gpus,
        "dollars_per_hour": plan.gpus * report.price,
        "dollars_per_million": prices(report, plan),
        "prefill": {
            "gpus": prefill.gpus,
            "groups": prefill.groups,
            "ep": prefill.option.group.ranks,
            "step_tokens": prefill.option.step_tokens,
            "ttft_s": prefill.ttft_s,
        },
        "decode": _decode_json(report, plan.decode),
    }


def _decode_json(report: PlanReport, pool: DecodePool) -> dict[str, Any]:
    group = pool.option.group
    return {
        "gpus": pool.gpus,
        "groups": pool.groups,
        "ep": group.ranks,
        "experts_per_gpu": group.slots,
        "mtp": group.drafts,
        "tokens_per_step": pool.option.accepted,
        "tpot_s": pool.tpot_s,
        "kv_tokens_per_gpu": group.kv_tokens,
        "dollars_per_million_output": dollars_per_million(
            report, pool.gpus, report.traffic.answer_tokens
        ),
    }


# ---- as text ----


def describe(report: PlanReport) -> str:
    parts = [_question(report), _answer(report), _sizes(report), _errors(report)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _question(report: PlanReport) -> list[str]:
    traffic, limits = report.traffic, report.limits
    gpu, requests = report.choices.base.gpu.name, len(traffic.requests)
    asked = (
        f"DeepSeek-R1 on {gpu}, modelled: {report.name}, {requests:,} requests in "
        f"{traffic.span_s:,.0f} s, mean {traffic.prompt_tokens / requests:,.0f} tokens in, "
        f"{traffic.answer_tokens / requests:,.0f} out"
    )
    within = f"ttft={shown_s(limits.ttft_s)}, tpot={shown_s(limits.tpot_s)}"
    lines = [asked, f"limits for {limits.percentile:g} %: {within}"]
    if report.trace.too_long:
        lines.append(f"left out: {report.trace.too_long} requests, longer than the context")
    return lines


def _answer(report: PlanReport) -> list[str]:
    prefill, decode, price = report.plan.prefill, report.plan.decode, prices(report, report.plan)

    def million(side: str) -> str:
        quick = _money(prices(report, report.quick)[side])
        slow = "more"
        if side == "input" and report.slow_prefill is not None:
            tokens = report.traffic.prompt_tokens
            slow = f"${_money(dollars_per_million(report, report.slow_prefill.gpus, tokens))}"
        elif report.slow is not None:
            slow = f"${_money(prices(report, report.slow)[side])}"
        return f"${_money(price[side])} (${quick} to {slow})"

    def pool(found: PrefillPool | DecodePool) -> str:
        return f"{found.gpus:,}: {found.groups} x EP{found.option.group.ranks}"

    slow = "more" if report.slow is None else f"{report.slow.gpus:,}"
    gpus = f"{report.plan.gpus:,} ({report.quick.gpus:,} to {slow})"
    steps = f"steps of {prefill.option.step_tokens:,} tokens"
    return [
        f"  GPUs     {gpus}, ${report.plan.gpus * report.price:,.2f} an hour",
        f"  prefill  {pool(prefill)}, {steps}; ttft {shown_s(prefill.ttft_s)}",
        f"  decode   {pool(decode)}, {_drafts(decode)}; tpot {shown_s(decode.tpot_s)}",
        f"  price    for a million tokens {million('input')} in, {million('output')} out",
    ]


def _sizes(report: PlanReport) -> list[str]:
    lines = ["  decode groups of   GPUs  drafts    tpot  $ per million out"]
    for pool in report.plan.others:
        cost = dollars_per_million(report, pool.gpus, report.traffic.answer_tokens)
        mark = "  <" if pool is report.plan.decode else ""
        lines.append(
            f"  EP{pool.option.group.ranks:<13} {pool.gpus:>7,} {pool.option.group.drafts:>7} "
            f"{shown_s(pool.tpot_s):>7} {_money(cost):>18}{mark}"
        )
    return lines


def _errors(report: PlanReport) -> list[str]:
    low, high = error_range()
    lines = [
        f"In brackets: steps {1 / high:.2f} to {1 / low:.2f} times as long as modelled, as published systems had them."
    ]
    if report.slow is None:
        lines.append(f"At {1 / low:.2f} times, groups of these sizes keep the limits no more.")
    answers_s = (
        report.plan.decode.tpot_s * report.traffic.answer_tokens / len(report.traffic.requests)
    )
    if report.traffic.span_s < ENOUGH_ANSWERS * answers_s:
        lines.append(
            f"The trace lasts {report.traffic.span_s:,.0f} s and an answer {answers_s:,.0f} s: this is a burst."
        )
    return lines


def _drafts(pool: DecodePool) -> str:
    drafts = pool.option.group.drafts
    if not drafts:
        return "no drafts"
    plural = "s" if drafts > 1 else ""
    return f"{drafts} draft{plural} ({pool.option.accepted:.2f} tokens a step)"


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

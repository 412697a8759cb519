"""Each alert fires for what it is about, after its time, and for nothing else: `promtool test rules`."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tools import prometheus_tool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
MINUTES = 28 * 60  # of the longest case


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series with a sample a minute, of a router `bad` for which the alert fires and of one called `good`."""

    alert: str
    bad: dict[str, str]
    good: dict[str, str]
    fires_at: str
    not_yet_at: str
    labels: dict[str, str] = field(default_factory=dict)  # of the alert, besides job and instance
    by_job: bool = False  # one alert for all routers of a job


def grows(by: int) -> str:
    return f"0+{by}x{MINUTES}"


OK = 'headrace_http_requests_total{route="/v1/chat/completions",status="200",error=""}'
BROKEN = 'headrace_http_requests_total{route="/v1/completions",status="503",error="no_worker"}'
CUT = 'headrace_streams_broken_total{reason="worker_lost"}'
PAGES = 'headrace_http_requests_total{route="/metrics",status="500",error=""}'
MET, MISSED = (
    f'headrace_slo_requests_total{{result="{result}"}}' for result in ("met", "late_first_token")
)
READY = 'headrace_workers{state="ready"}'
FULL = 'headrace_refused_total{reason="queued tokens"}'
TOKENS, OTHER_TOKENS = (f'headrace_completion_tokens_total{{model="{m}"}}' for m in ("m", "other"))
NEVER_FREED = 'headrace_legs_total{outcome="never_freed"}'
RSS, FDS = "process_resident_memory_bytes", "process_open_fds"
LABELS = 'worker="w",model="m"'
CACHES = {
    f"headrace_{name}_bytes": "0x2000"
    for name in ("index", "prompt_cache", "chain_memo", "description", "responses_stored")
}

CASES = [
    Case(
        alert="HeadraceRouterDown",
        bad={"up": "1x4 0x20"},
        good={"up": "1x30"},
        not_yet_at="5m",
        fires_at="6m",
    ),
    Case(
        alert="HeadraceNoWorker",
        bad={READY: "1x4 0x20", 'headrace_workers{state="joining"}': "1x30"},
        good={READY: "1x30"},
        not_yet_at="5m",
        fires_at="6m",
    ),
    Case(
        alert="HeadraceFewerWorkers",
        bad={READY: "8x9 5x60"},
        good={READY: "8x9 6x60"},
        not_yet_at="19m",
        fires_at="20m",
    ),
    Case(
        alert="HeadraceWorkerLost",
        bad={"headrace_suspects_total": "0x9 1x30"},
        good={"headrace_suspects_total": "3x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceGroupLost",
        bad={"headrace_groups_lost_total": "0x9 1x30"},
        good={"headrace_groups_lost_total": "1x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceGroupIncomplete",
        bad={'headrace_group_whole{group="g",model="m"}': "1x4 0x30"},
        good={'headrace_group_whole{group="g",model="m"}': "1x4 0x8 1x30"},
        not_yet_at="14m",
        fires_at="15m",
        labels={"group": "g", "model": "m"},
    ),
    Case(
        alert="HeadraceWorkerFlaps",
        bad={"headrace_circuits_open": "0x4 1x30"},
        good={"headrace_circuits_open": "0x30"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceErrorBudgetBurnsFast",
        bad={OK: grows(970), BROKEN: grows(30)},
        # 0.5 % of failures is below both thresholds, and errors of other pages do not count
        good={OK: grows(995), BROKEN: grows(5), PAGES: grows(1_000)},
        not_yet_at="2m",
        fires_at="10m",
        by_job=True,
    ),
    Case(
        alert="HeadraceErrorBudgetBurnsFast",
        bad={OK: grows(1_000), CUT: grows(10)},
        good={OK: grows(1_000), CUT: grows(1)},
        not_yet_at="1m",
        fires_at="2h",
        by_job=True,
    ),
    Case(
        alert="HeadraceErrorBudgetBurns",
        bad={OK: grows(996), BROKEN: grows(4)},
        good={OK: grows(998), BROKEN: grows(2)},
        not_yet_at="50m",
        fires_at="26h",
        by_job=True,
    ),
    Case(
        alert="HeadraceDeadlinesMissed",
        bad={MET: grows(80), MISSED: grows(20)},
        good={MET: grows(95), MISSED: grows(5)},
        not_yet_at="2m",
        fires_at="10m",
        by_job=True,
    ),
    Case(
        alert="HeadraceStalled",
        bad={"headrace_streams": "3x60", TOKENS: "0+9x9 90x60", OTHER_TOKENS: "7x60"},
        # an idle router has no tokens either, and a busy one has moments without an answer in flight
        good={"headrace_streams": "0x60", TOKENS: "0+9x9 90x60"},
        not_yet_at="14m",
        fires_at="18m",
    ),
    Case(
        alert="HeadraceStalled",
        bad={"headrace_streams": "3x60", TOKENS: "0+9x9 90x60"},
        # nobody asks one of its models
        good={"headrace_streams": "3x60", TOKENS: "7x60", OTHER_TOKENS: "0+9x60"},
        not_yet_at="14m",
        fires_at="18m",
    ),
    Case(
        alert="HeadraceWorkerStalled",
        bad={
            f"headrace_worker_running{{{LABELS}}}": "4x60",
            f"headrace_worker_heartbeat_age_seconds{{{LABELS}}}": "0.5x4 6x60",
        },
        good={
            f"headrace_worker_running{{{LABELS}}}": "0x60",
            f"headrace_worker_heartbeat_age_seconds{{{LABELS}}}": "6x60",
        },
        not_yet_at="5m",
        fires_at="6m",
        labels={"worker": "w", "model": "m"},
    ),
    Case(
        alert="HeadraceLegsNotFreed",
        bad={NEVER_FREED: "_x24 1x60"},  # its first event makes the series
        good={NEVER_FREED: "1x60"},
        not_yet_at="23m",
        fires_at="24m",
    ),
    Case(
        alert="HeadraceQueueFull",
        bad={FULL: "0x4 0+3x60"},
        good={'headrace_refused_total{reason="deadline"}': grows(3), FULL: "7x60"},
        not_yet_at="6m",
        fires_at="9m",
        labels={"reason": "queued tokens"},
    ),
    Case(
        alert="HeadraceQueueSlow",
        bad={"headrace_queue_oldest_seconds": "0x4 16x60"},
        good={"headrace_queue_oldest_seconds": "15x60"},
        not_yet_at="6m",
        fires_at="7m",
    ),
    Case(
        alert="HeadraceCreditLost",
        bad={f"headrace_worker_credit{{{LABELS}}}": "1x4 0x60"},
        good={f"headrace_worker_credit{{{LABELS}}}": "1x60"},
        not_yet_at="9m",
        fires_at="10m",
        labels={"worker": "w", "model": "m"},
    ),
    Case(
        alert="HeadraceFleetTooSmall",
        bad={
            'headrace_scale_needed_workers{model="m",role="both"}': "4x4 5x60",
            'headrace_scale_workers{model="m",role="both"}': "4x64",
        },
        good={
            'headrace_scale_needed_workers{model="m",role="both"}': "4x64",
            'headrace_scale_workers{model="m",role="both"}': "4x64",
        },
        not_yet_at="22m",
        fires_at="26m",
        labels={"model": "m", "role": "both"},
        by_job=True,
    ),
    Case(
        alert="HeadraceSpeedDoubted",
        bad={f"headrace_worker_speed_doubted{{{LABELS}}}": "0x4 1x60"},
        good={f"headrace_worker_speed_doubted{{{LABELS}}}": "0x60"},
        not_yet_at="19m",
        fires_at="20m",
        labels={"worker": "w", "model": "m"},
    ),
    Case(
        alert="HeadraceBlocksForgotten",
        bad={'headrace_blocks_lost_total{reason="sequence"}': "0x9 0+1x60"},
        good={'headrace_blocks_lost_total{reason="sequence"}': "0x9 0+1x4 4x60"},
        not_yet_at="14m",
        fires_at="40m",
        labels={"reason": "sequence"},
    ),
    Case(
        alert="HeadracePredictionsWrong",
        bad={
            "headrace_ttft_prediction_error_seconds_sum": grows(60),
            "headrace_ttft_prediction_error_seconds_count": grows(60),
            'headrace_ttft_seconds_sum{model="m"}': grows(100),
        },
        # half of the time exactly, and as wrong as can be but of five requests a minute
        good={
            "headrace_ttft_prediction_error_seconds_sum": grows(60),
            "headrace_ttft_prediction_error_seconds_count": grows(5),
            'headrace_ttft_seconds_sum{model="m"}': grows(100),
        },
        not_yet_at="29m",
        fires_at="40m",
        by_job=True,
    ),
    Case(
        alert="HeadraceTransfersFail",
        bad={
            'headrace_transfers_total{backend="tcp",outcome="ok"}': grows(90),
            'headrace_transfers_total{backend="tcp",outcome="timeout"}': grows(10),
        },
        good={
            'headrace_transfers_total{backend="tcp",outcome="ok"}': grows(96),
            'headrace_transfers_total{backend="tcp",outcome="timeout"}': grows(4),
        },
        not_yet_at="9m",
        fires_at="15m",
        by_job=True,
    ),
    Case(
        alert="HeadraceBookingsLeak",
        bad={"headrace_booked_legs": "2x60", "headrace_streams": "1x9 0x60"},
        good={"headrace_booked_legs": "2x9 0x60", "headrace_streams": "1x9 0x60"},
        not_yet_at="28m",
        fires_at="32m",
    ),
    Case(
        alert="HeadraceChargedMemoryLeaks",
        bad={
            "headrace_http_body_bytes": "0x60",
            "headrace_http_answer_bytes": "4096x60",
            "headrace_streams": "0x60",
            "headrace_http_connections": "0x60",
        },
        good={
            "headrace_http_body_bytes": "0x60",
            "headrace_http_answer_bytes": "4096x60",
            "headrace_streams": "0x60",
            "headrace_http_connections": "1x60",  # its client may still read
        },
        not_yet_at="4m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceMemoryGrows",
        bad={RSS: f"{1 << 30}+2000000x2000", **CACHES},
        # as much, but of the index of cached prompts
        good={
            RSS: f"{1 << 30}+2000000x2000",
            **CACHES,
            "headrace_index_bytes": f"{1 << 30}+2000000x2000",
        },
        not_yet_at="11h",
        fires_at="16h",
    ),
    Case(
        alert="HeadraceFilesNearLimit",
        bad={FDS: "100x4 900x60", "process_max_fds": "1024x60"},
        good={FDS: "800x60", "process_max_fds": "1024x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceFilesRefused",
        bad={"headrace_reloads_refused": "0x4 1x60"},
        good={"headrace_reloads_refused": "0x60"},
        not_yet_at="5m",
        fires_at="6m",
    ),
    Case(
        alert="HeadraceNotRegistered",
        bad={
            "headrace_discovery_registered": "1x4 0x60",
            'headrace_discovery_errors_total{reason="etcd_unreachable"}': "_x4 1x60",
        },
        good={"headrace_discovery_registered": "0x60"},  # it is not asked to register
        not_yet_at="5m",
        fires_at="6m",
    ),
    Case(
        alert="HeadraceResponsesNotStored",
        bad={"headrace_response_store_errors_total": "0x9 1x60"},
        good={"headrace_response_store_errors_total": "3x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceLogLosesLines",
        bad={'headrace_log_lines_dropped_total{why="too_slow"}': "0x9 5x60"},
        good={'headrace_log_lines_dropped_total{why="too_slow"}': "5x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
    Case(
        alert="HeadraceLogLosesLines",
        bad={
            'headrace_log_lines_dropped_total{why="too_slow"}': "0x60",
            "headrace_decision_log_errors_total": "0x9 5x60",
        },
        good={"headrace_decision_log_dropped_total": "5x60"},
        not_yet_at="9m",
        fires_at="10m",
    ),
]


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def of(router: str, case: Case, series: dict[str, str]) -> list[dict[str, str]]:
    """The series with the labels that Prometheus adds."""
    job = f"headrace-{router}" if case.by_job else "headrace"
    added = f'job="{job}",instance="{router}"'
    named: list[dict[str, str]] = []
    for name, values in series.items():
        stem, _, labels = name.rstrip("}").partition("{")
        inner = ",".join(filter(None, (labels, added)))
        named.append({"series": f"{stem}{{{inner}}}", "values": values})
    return named


def expected(case: Case) -> dict[str, str]:
    """The labels of the one alert that fires."""
    where = {"job": "headrace-bad"} if case.by_job else {"job": "headrace", "instance": "bad"}
    severity = rules()[case.alert]["labels"]["severity"]
    return where | case.labels | {"severity": severity}


def promtool_test(case: Case) -> dict[str, Any]:
    firing = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    labels = expected(case) | {"alertname": case.alert, "alertstate": "firing"}
    inner = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
    return {
        "interval": "1m",
        "input_series": of("bad", case, case.bad) + of("good", case, case.good),
        "promql_expr_test": [
            {"expr": firing, "eval_time": case.not_yet_at, "exp_samples": []},
            {
                "expr": firing,
                "eval_time": case.fires_at,
                "exp_samples": [{"labels": f"ALERTS{{{inner}}}", "value": 1}],
            },
        ],
    }


def test_promtool_takes_the_rules() -> None:
    promtool = prometheus_tool("promtool")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert {case.alert for case in CASES} == set(rules())


@pytest.mark.parametrize("name", sorted(rules()))
def test_an_alert_says_what_happened_and_names_only_labels_that_it_has(name: str) -> None:
    rule = rules()[name]
    assert rule["labels"]["severity"] in {"page", "ticket"}
    text = rule["annotations"]["summary"] + rule["annotations"]["description"]
    used = set(re.findall(r"\$labels\.(\w+)", text))
    (has,) = {frozenset(expected(case)) for case in CASES if case.alert == name}
    assert used <= has


def run_promtool(tmp_path: Path, cases: list[Case], rule_file: Path, interval: str) -> str | None:
    """What promtool says against the rules, if anything."""
    plan = {
        "rule_files": [str(rule_file)],
        "evaluation_interval": interval,
        "tests": [promtool_test(case) for case in cases],
    }
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump(plan))
    promtool = prometheus_tool("promtool")
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


# Rules see what others recorded for five minutes, so those are longer than an interval.
HOURS_LONG = [case for case in CASES if case.fires_at.endswith("h")]
MINUTES_LONG = [case for case in CASES if case not in HOURS_LONG]


@pytest.mark.parametrize(
    ("cases", "interval"), [(MINUTES_LONG, "1m"), (HOURS_LONG, "4m")], ids=["minutes", "hours"]
)
def test_alerts_fire_for_the_router_that_they_are_about_and_not_before_their_time(
    cases: list[Case], interval: str, tmp_path: Path
) -> None:
    problem = run_promtool(tmp_path, cases, RULES, interval)
    assert problem is None, problem


def test_promtool_notices_each_alert_that_is_not_as_expected(tmp_path: Path) -> None:
    """Guards the test above: promtool takes a file whose expectations it never looks at."""
    rule_file = tmp_path / "rules.yml"
    rule_file.write_text(re.sub(r"severity: (page|ticket)", "severity: none", RULES.read_text()))
    problem = run_promtool(tmp_path, MINUTES_LONG, rule_file, "1m")
    assert problem is not None
    assert problem.count("expr:") == len(MINUTES_LONG)

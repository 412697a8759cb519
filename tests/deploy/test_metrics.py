"""Dashboard and alerts use metrics and labels that a router exports, and leave out only what is listed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.exported import Exported, declared, families, of_page, problems, used
from helpers.serving.fleet import Fleet
from helpers.serving.server import eventually

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/headrace.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())

# What neither shows, and why.
NOT_SHOWN = {
    "headrace_spans_exported_total": "those that are lost are shown",
    "headrace_http_ignored_parameters_total": "says nothing about the service",
    "headrace_http_answers_refused_total": "a bound against single clients",
    "headrace_http_stream_waits_total": "slow clients are no fault of the service",
    "headrace_direct_reads_total": "for those who measure the router",
    "process_start_time_seconds": "Prometheus' `up` and the counters say when a router began anew",
    "process_virtual_memory_bytes": "addresses cost nothing; the resident memory is shown",
    "headrace_cancel_to_freed_seconds": "part of the hang-up below",
    "headrace_hangup_to_freed_seconds": "headrace_legs_total{outcome=never_freed} has the alert",
    "headrace_leases_expired_total": "in the outcomes of transfers",
    "headrace_transfer_bytes_total": "the durations say whether transfers are slow",
    "headrace_drain_blocks_handed_over_total": "for the one who drains",
    "headrace_circuits_opened_total": "headrace_circuits_open has the alert",
    "headrace_tls_handshakes_total": "of strangers, mostly",
    "headrace_reloads_total": "headrace_reloads_refused has the alert",
    "headrace_grammar_known_total": "for those who tune grammars",
    "headrace_grammar_refused_total": "a 400 for the client, shown by status",
    "headrace_responses_stored": "its bytes are shown",
    "headrace_responses_evicted_total": "its bytes are shown",
    "headrace_blocks_removed_unknown_total": "resyncs follow, and are shown",
    "headrace_decision_log_reopened_total": "on purpose",
    "headrace_speed_doubted_total": "headrace_worker_speed_doubted is shown",
    "headrace_key_requests_total": "tokens by key are shown",
    "headrace_key_streams": "tokens by key are shown",
    "headrace_queue_requests": "shown by class",
    "headrace_preemptions_total": "shown by worker",
    "headrace_tokenizer_queue_bytes": "the prompts are shown",
    "headrace_prompt_cache_entries": "its bytes are shown",
    "headrace_prompt_cache_hit_bytes_total": "its hits are shown",
    "headrace_prompt_encoder": "does not change while a router runs",
    "headrace_worker_blocks_indexed": "cached blocks are shown",
    "headrace_worker_pinned_requests": "arriving tokens are shown",
    "headrace_worker_booked_requests": "of this router alone; batches are shown",
    "headrace_worker_booked_tokens": "of this router alone; batches are shown",
    "headrace_worker_grammar_masks_total": "late steps are shown",
    "headrace_worker_grammar_mask_seconds_total": "late steps are shown",
    "headrace_worker_grammar_wait_seconds_total": "late steps are shown",
    "headrace_worker_grammar_compiled_total": "late steps are shown",
    "headrace_worker_grammar_compile_seconds_total": "late steps are shown",
    "headrace_worker_grammar_known_total": "late steps are shown",
    "headrace_rank_work_seconds_total": "skew and waited share are made of it",
    "headrace_rank_waited_seconds_total": "skew and waited share are made of it",
    "headrace_rank_held_rounds_total": "for those who tune groups",
    "headrace_rank_held_seconds_total": "for those who tune groups",
    "headrace_rank_expert_waves_total": "for those who tune groups",
    "headrace_rank_expert_slots_total": "for those who tune groups",
    "headrace_rank_expert_bytes_total": "for those who tune groups",
    "headrace_rank_expert_refusals_total": "for those who tune groups",
    "headrace_rank_expert_gain_seconds_total": "for those who tune groups",
    "headrace_rank_expert_cost_seconds_total": "for those who tune groups",
    "headrace_rank_expert_spent_seconds_total": "for those who tune groups",
}


def queries() -> dict[str, str]:
    """Every expression, by where it stands."""
    found: dict[str, str] = {}
    rows = DASHBOARD["panels"]
    for panel in [*rows, *(inside for row in rows for inside in row.get("panels", []))]:
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            found[rule.get("alert") or rule["record"]] = rule["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = variable["query"]["query"]
    return found


@pytest.fixture(scope="module")
def page(fleet: Fleet) -> str:
    """When what the fleet provoked has been counted."""
    provoked = [
        *("headrace_reloads_total{", "headrace_link_errors_total{", "headrace_slo_requests"),
        "headrace_scale_needed_workers{",
    ]

    def counted() -> str | None:
        page = fleet.metrics()
        return page if all(name in page for name in provoked) else None

    return eventually(counted, fleet.metrics, 60) or ""


@pytest.fixture(scope="module")
def exported(page: str) -> Exported:
    return declared() | of_page(page)


def test_the_declarations_say_what_the_router_shows(page: str) -> None:
    """So that they can be believed about what needs a fault to be shown."""
    live, known = of_page(page), declared()
    both = {name for name in known if live.get(name)}
    assert len(both) >= 15, both
    assert {name: live[name] for name in both} == {name: known[name] for name in both}


def test_every_query_uses_what_a_router_exports(exported: Exported) -> None:
    wrong = {where: problems(expr, exported) for where, expr in queries().items()}
    assert {where: what for where, what in wrong.items() if what} == {}


def test_what_a_router_exports_is_shown_or_left_out_on_purpose(page: str) -> None:
    def stem(name: str) -> str:
        return name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")

    exported = families(page) | {stem(name) for name in declared()}
    shown = {stem(name) for expr in queries().values() for name in used(expr)}
    assert exported - shown - set(NOT_SHOWN) == set(), "show them, or say why not"
    assert set(NOT_SHOWN) - exported == set(), "no router exports these any more"
    assert set(NOT_SHOWN) & shown == set(), "these are shown"


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ('sum by (class) (a{x="1"}) + headrace_q{class="low"}', []),
        ('headrace_q{klass="low"}', ["headrace_q{klass}"]),
        ("headrace_none", ["headrace_none"]),
        ("sum by (worker) (headrace_q)", ["by worker"]),
        ("headrace_q and on (job, instance) headrace_q", []),
        ("rate(headrace_q[5m]) / on (x) group_left (y) headrace_q", ["by x", "by y"]),
    ],
)
def test_a_wrong_name_or_label_is_found(expr: str, wrong: list[str]) -> None:
    assert problems(expr, {"headrace_q": frozenset({"class"})}) == wrong

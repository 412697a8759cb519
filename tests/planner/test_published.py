"""The table of published and modelled throughput: as committed, and not worse than it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plan import examples, reproduce
from headrace.planner.published import SOURCES, error_range, published_rates
from headrace.planner.quantile import quantile

ROOT = Path(__file__).parents[2]


def test_the_committed_table_is_what_the_model_gives() -> None:
    written = json.loads((ROOT / "bench/results/plan_published.json").read_text())
    assert written == json.loads(json.dumps(reproduce.result())), (
        f"write it again: {written['command']}"
    )


def test_the_document_has_every_row() -> None:
    assert reproduce.table(reproduce.result()["rows"]) in (ROOT / "docs/plan.md").read_text()


def test_the_document_has_the_examples() -> None:
    written = json.loads((ROOT / "bench/results/plan_examples.json").read_text())
    assert examples.table(written["plans"]) in (ROOT / "docs/plan.md").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_committed_examples_are_what_the_command_gives() -> None:
    written = json.loads((ROOT / "bench/results/plan_examples.json").read_text())
    assert written == json.loads(json.dumps(examples.result())), (
        f"write it again: {written['command']}"
    )


def test_most_rows_with_published_settings_are_within_a_quarter() -> None:
    known = reproduce.result()["settings_published"]
    assert known["within_25_percent"] >= 0.7 * known["rows"]
    assert known["median_error"] < 0.15


def test_each_row_names_a_source_and_each_source_is_used() -> None:
    assert {rate.source for rate in published_rates()} == set(SOURCES)


def test_names_are_told_apart() -> None:
    names = [(rate.name, rate.gpu) for rate in published_rates()]
    assert len(set(names)) == len(names)


def test_the_error_has_both_sides() -> None:
    low, high = error_range()
    assert 0.5 < low < 1 < high < 1.5


def test_quantiles_by_hand() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.1) == pytest.approx(1.4)
    assert quantile([7.0], 0.9) == 7.0

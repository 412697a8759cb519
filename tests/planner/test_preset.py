"""Five costs from steps, against costs that are known and against every subset."""

from __future__ import annotations

import random

import pytest

from headrace.planner.fleet.options import DecodeOption
from headrace.planner.fleet.preset import best_costs, worker_preset
from headrace.planner.model.gpus import GPUS
from headrace.planner.model.group import ExpertGroup


def test_known_costs_are_found() -> None:
    known, draw = [20.0, 0.0, 0.1], random.Random(3)
    rows: list[list[float]] = []
    for _ in range(20):
        features = [1.0, draw.uniform(0, 50), draw.uniform(0, 1000)]
        ms = sum(x * y for x, y in zip(known, features, strict=True))
        rows.append([part / ms for part in features])
    assert best_costs(rows) == pytest.approx(known, abs=1e-6)


def test_costs_are_never_negative() -> None:
    # the best of all costs would be 2 and -1
    rows = [[1.0, 1.0], [1.0, 1.0001], [2.0, 3.0]]
    assert min(best_costs(rows)) >= 0


def test_columns_that_depend_on_each_other_do_no_harm() -> None:
    assert sum(best_costs([[1.0, 2.0], [2.0, 4.0]])) > 0


@pytest.mark.parametrize(("gpu", "ranks"), [("h200", 8), ("h100", 72), ("gb200", 32)])
def test_a_preset_is_close_to_the_steps(gpu: str, ranks: int) -> None:
    weights = GPUS[gpu].weights
    group = ExpertGroup(gpu=GPUS[gpu], ranks=ranks, weights=weights, linear=weights)
    preset = worker_preset(DecodeOption(group=group, accepted=1.0))
    assert preset["fit"]["median_error"] < 0.12
    assert preset["fit"]["worst_error"] < 0.3
    assert min(preset["cost"].values()) >= 0
    assert preset["blocks"] * 64 <= group.kv_tokens < (preset["blocks"] + 1) * 64
    assert preset["kv_token_bytes"] == 35_136

"""The table of predicted costs is what its formula says, and holds all that the formula tells apart."""

import json

import pytest

from routing.formula import FILE, table


def test_the_table_is_what_the_formula_gives() -> None:
    kept = json.loads(FILE.read_text())
    made = table()
    assert len(kept) == len(made)
    for row, expected in zip(kept, made, strict=True):
        assert row["estimate"] == pytest.approx(expected["estimate"], rel=1e-12)
        assert {**row, "estimate": None} == {**expected, "estimate": None}


def test_no_term_of_a_cost_is_left_out() -> None:
    rows = json.loads(FILE.read_text())
    for role in ("both", "decode", "prefill", "pair"):
        estimates = [row["estimate"] for row in rows if row["role"] == role]
        for term in ("queue_ms", "prefill_ms", "interference_ms", "saturation_ms"):
            assert len({round(estimate[term], 6) for estimate in estimates}) > 5, (role, term)
    queues = [row["queue"] for row in rows if row["role"] != "pair"]
    assert {queue["rule"] for queue in queues if queue["prompts"]} == {"fifo", "halves"}
    assert any("awaits" in prompt for queue in queues for prompt in queue["prompts"])
    assert any("awaits" in queue for queue in queues)

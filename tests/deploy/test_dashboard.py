"""The dashboard is what its tables give, fits Grafana's own types, and its places and queries are in order."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as grafana

from deploy.grafana import build
from helpers.tools import prometheus_tool

DASHBOARD: dict[str, Any] = json.loads(build.FILE.read_text())


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", [])


def graphs() -> list[dict[str, Any]]:
    return [panel for panel in panels() if panel["type"] != "row"]


def expressions() -> list[str]:
    """All queries, with the variables as Grafana replaces them."""
    found = [target["expr"] for panel in graphs() for target in panel["targets"]]
    values = {"$__rate_interval": "1m", "$job": "headrace", "$instance": ".*", "$model": ".*"}
    for name, value in values.items():
        found = [expr.replace(name, value) for expr in found]
    assert not [expr for expr in found if "$" in expr]
    return found


def test_the_file_is_what_the_tables_give() -> None:
    assert build.FILE.read_text() == build.text(), "run: python -m deploy.grafana.build"


def test_grafanas_own_types_read_and_write_it_without_a_loss() -> None:
    register_default_plugins()
    read = grafana.Dashboard.from_json(DASHBOARD)
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    assert missing_from(written, DASHBOARD) == []


def missing_from(written: Any, ours: Any, path: str = "") -> list[str]:
    """Where `written` lacks what we say or says something else. It may say more: defaults."""
    if isinstance(ours, dict):
        if not isinstance(written, dict):
            return [path]
        return [
            problem
            for key, value in ours.items()
            for problem in (
                missing_from(written[key], value, f"{path}.{key}")
                if key in written
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(ours, list):
        if not isinstance(written, list) or len(written) != len(ours):
            return [path]
        pairs = enumerate(zip(written, ours, strict=True))
        return [p for i, (theirs, own) in pairs for p in missing_from(theirs, own, f"{path}[{i}]")]
    return [] if written == ours else [path]


def test_a_field_that_grafana_does_not_know_is_noticed() -> None:
    assert missing_from({"a": [1]}, {"a": [1]}) == []
    assert missing_from({"a": [1], "more": 2}, {"a": [1]}) == []
    assert missing_from({}, {"a": 1}) == [".a"]
    assert missing_from({"a": [2]}, {"a": [1]}) == [".a[0]"]
    assert missing_from({"a": [1, 2]}, {"a": [1]}) == [".a"]
    assert missing_from({"a": 1}, {"a": {"b": 1}}) == [".a"]


def test_panels_have_numbers_of_their_own_and_do_not_lie_on_each_other() -> None:
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers))
    places = [panel["gridPos"] for panel in panels()]
    for place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= build.WIDTH
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or apart, (a, b)


def test_every_panel_says_what_it_shows_and_has_a_query() -> None:
    titles = [panel["title"] for panel in graphs()]
    assert len(titles) == len(set(titles)) > 40
    for panel in graphs():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))


def test_a_legend_shows_labels_that_its_query_keeps() -> None:
    for panel in graphs():
        for target in panel["targets"]:
            kept = {
                label.strip()
                for by in re.findall(r"by \(([^)]*)\)", target["expr"])
                for label in by.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


def test_variables_that_queries_use_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == declared


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": expr} for number, expr in enumerate(expressions())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool = prometheus_tool("promtool")
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("wrong", ["sum by (rate(x[5m]))", "rate(x)"])
def test_promtool_refuses_a_query_that_is_wrong(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "queries.yml"
    rules = [{"record": "query:0", "expr": wrong}]
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool = prometheus_tool("promtool")
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert done.returncode != 0

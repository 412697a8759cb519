"""A real Prometheus scrapes a real router, evaluates the alerts, and answers the dashboard's queries."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.ports import held_ports
from helpers.serving.fleet import METRICS_KEY, Fleet
from helpers.serving.server import eventually
from helpers.tools import prometheus_tool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/headrace.json").read_text())
OFTEN = "200ms"


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def value(self, expr: str) -> float | None:
        """Of a query that gives one sample."""
        found = self.get("query", query=expr)["result"]
        return float(found[0]["value"][1]) if found else None

    def is_up(self) -> bool:
        try:
            return self.value('up{job="headrace"}') == 1
        except OSError:
            return False


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Generator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    key = folder / "key"
    key.write_text(METRICS_KEY)
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": OFTEN, "evaluation_interval": OFTEN}
    config["rule_files"] = [str(RULES)]
    (scrape,) = config["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(key)
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{fleet.router.port}"]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with held_ports(1) as (port,), (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                prometheus_tool("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            running = Prometheus(port)
            eventually(running.is_up, lambda: (folder / "log").read_text()[-2_000:], 60)
            yield running
        finally:
            process.terminate()
            process.wait(60)


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        return all(not rule["lastEvaluation"].startswith("0001") for rule in prometheus.rules())

    eventually(evaluated, lambda: str(prometheus.rules()))
    rules = prometheus.rules()
    assert len(rules) > 30
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_a_fault_of_the_router_becomes_an_alert(prometheus: Prometheus, fleet: Fleet) -> None:
    def state() -> str:
        (rule,) = [rule for rule in prometheus.rules() if rule["name"] == "HeadraceFilesRefused"]
        return rule["state"]

    right = fleet.client_keys.read_text()
    assert state() == "inactive"
    try:
        fleet.client_keys.write_text("a line that = cannot be right\n")
        fleet.router.process.send_signal(signal.SIGHUP)
        eventually(lambda: state() == "pending", state)
    finally:
        fleet.client_keys.write_text(right)
        fleet.router.process.send_signal(signal.SIGHUP)
    eventually(lambda: state() == "inactive", state)


def test_the_dashboard_has_an_answer_to_every_query_and_figures_for_what_happened(
    prometheus: Prometheus, fleet: Fleet
) -> None:
    values = {"$__rate_interval": "30s", "$job": "headrace", "$instance": ".*", "$model": ".*"}
    rows = DASHBOARD["panels"]
    panels = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in [*rows, *(inside for row in rows for inside in row.get("panels", []))]
        if "targets" in panel
    }

    def answer(expr: str) -> list[Any]:
        for name, value in values.items():
            expr = expr.replace(name, value)
        return prometheus.get("query", query=expr)["result"]

    for exprs in panels.values():
        for expr in exprs:
            answer(expr)  # an error of PromQL is a status of 400
    for title in ("Requests", "Time to first token", "Time per output token", "Tokens"):
        assert fleet.complete("alone") == 200

        def has_figures(title: str = title) -> bool:
            samples = [one for expr in panels[title] for one in answer(expr)]
            return any(float(one["value"][1]) > 0 for one in samples)

        eventually(has_figures, lambda title=title: title)
    for title in ("Workers by state", "KV blocks in use", "Waiting by class", "Ranks", "Memory"):
        assert all(answer(expr) for expr in panels[title]), title

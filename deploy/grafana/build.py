"""Writes `headrace.json`, Grafana's dashboard: `python -m deploy.grafana.build` from the root of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .more_panels import DEGRADED, ERRORS, GROUPS, PREDICTIONS, ROUTERS, SCALING, WORKERS
from .panels import CACHE, LATENCY, QUEUE, SUMMARY, TRAFFIC, Panel, Row

FILE = Path(__file__).with_name("headrace.json")
ROWS = (
    *(SUMMARY, LATENCY, TRAFFIC, QUEUE, CACHE, PREDICTIONS),
    *(WORKERS, SCALING, ERRORS, DEGRADED, ROUTERS, GROUPS),
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
GRAPH = {"w": 8, "h": 8}
STAT = {"w": 3, "h": 4}
# Grafana 10.1 and newer; newer ones bring the dashboard to their own version themselves.
SCHEMA_VERSION = 38


def variable(name: str, label: str, query: str, *, many: bool) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"qryType": 1, "query": query, "refId": name},
        "refresh": 2,  # as often as the time range changes
        "sort": 1,
        "multi": many,
        "includeAll": many,
        "current": {"selected": True, "text": "All", "value": "$__all"} if many else {},
    }


VARIABLES: list[dict[str, Any]] = [
    {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    },
    variable("job", "Job", "label_values(headrace_build_info, job)", many=False),
    variable(
        "instance", "Router", 'label_values(headrace_build_info{job="$job"}, instance)', many=True
    ),
    variable(
        "model",
        "Model",
        'label_values(headrace_completion_tokens_total{job="$job"}, model)',
        many=True,
    ),
]


def panel(what: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """One panel at its place."""
    steps = [{"color": color, "value": value} for color, value in what.steps]
    custom: dict[str, Any] = {} if what.stat else {"fillOpacity": 20 if what.stacked else 0}
    if what.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if what.stat:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
        }
    size = STAT if what.stat else GRAPH
    return {
        "id": number,
        "type": "stat" if what.stat else "timeseries",
        "title": what.title,
        "description": what.about,
        "datasource": SOURCE,
        "gridPos": {**size, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {
                "unit": what.unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for index, query in enumerate(what.queries)
        ],
    }


def placed(row: Row, first: int, y: int) -> tuple[list[dict[str, Any]], int]:
    """The panels of a row, left to right and line by line below `y`, and where the next row begins."""
    panels: list[dict[str, Any]] = []
    x = height = 0
    for what in row.panels:
        size = STAT if what.stat else GRAPH
        if x + size["w"] > WIDTH:
            x, y, height = 0, y + height, 0
        panels.append(panel(what, first + len(panels), x, y))
        x, height = x + size["w"], max(height, size["h"])
    return panels, y + height


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    number, y = 1, 0
    for row in ROWS:
        head: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
            "panels": [],
        }
        inside, y = placed(row, number + 1, y + 1)
        panels.append(head)
        if row.collapsed:
            head["panels"] = inside
        else:
            panels += inside
        number += 1 + len(inside)
    return {
        "uid": "headrace",
        "title": "Headrace",
        "description": "Routers and workers of Headrace, by what the routers' /metrics say.",
        "tags": ["headrace", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": VARIABLES},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

"""Which metrics a router exports, with which labels: from a page of /metrics, and from declarations in its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

METRICS = Path(__file__).parents[2] / "router/src/metrics"
Exported = dict[str, frozenset[str]]
# Labels of a histogram's buckets, and those that Prometheus adds.
BUCKET = "le"
ADDED = frozenset({"job", "instance"})

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$")
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')
_DECLARED = re.compile(r'(\w+): (?:Labelled<(\w+)>|(\w+)) = "(\w+)"')
_OF_A_MODEL = re.compile(r'\w+: (\w+)(?:<\w+>)? = "(\w+)",\s*"[^"]*"(?:, (\w+))?;')


def of_page(page: str) -> Exported:
    """By the name of each sample, all labels that samples of it have."""
    found: Exported = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        assert sample is not None, line
        name, labels = sample[1], frozenset(_LABEL.findall(sample[2] or ""))
        found[name] = found.get(name, frozenset()) | labels
    return found


def families(page: str) -> set[str]:
    """The families that a page has, with samples or without."""
    return set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))


def declared() -> Exported:
    """What is counted from its first event on, which a router without faults does not show."""
    sets = {name: frozenset({label}) for name, label in _one_label()} | dict(_several_labels())
    found: Exported = {}
    for file in METRICS.glob("*.rs"):
        if file.stem == "models":
            continue
        for _, labels, kind, name in _DECLARED.findall(file.read_text()):
            assert labels == "" or labels in sets, f"{file.name}: labels of {name}"
            found |= _samples(kind, name, sets.get(labels, frozenset()))
    of_a_model = _OF_A_MODEL.findall((METRICS / "models.rs").read_text())
    for kind, name, word in of_a_model:
        found |= _samples(kind, name, frozenset({"model", word} - {""}))
    assert len(found) > 50 and len(of_a_model) > 10, "the form of the declarations has changed"
    return found


def _samples(kind: str, name: str, labels: frozenset[str]) -> Exported:
    if kind != "Histogram":
        return {name: labels}
    return {f"{name}_bucket": labels | {BUCKET}, f"{name}_sum": labels, f"{name}_count": labels}


def _one_label() -> list[tuple[str, str]]:
    return re.findall(
        r"^\s+(By\w+) \{ (\w+) \}$", (METRICS / "kinds/labels.rs").read_text(), re.MULTILINE
    )


def _several_labels() -> list[tuple[str, frozenset[str]]]:
    text = "".join(file.read_text() for file in METRICS.rglob("*.rs"))
    structs = re.findall(r"pub struct (By\w+) \{\n(.*?)\n\}", text, re.DOTALL)
    return [
        (name, frozenset(re.findall(r"pub(?:\([a-z: ]+\))? (\w+):", fields)))
        for name, fields in structs
    ]


def used(expr: str) -> Exported:
    """The metrics in a PromQL expression, each with the labels of its matchers."""
    found: Exported = {}
    for name, matchers in re.findall(r"\b((?:headrace|process)_\w+)(?:\{([^}]*)\})?", expr):
        labels = frozenset(re.findall(r"(\w+)\s*[=!]~?", matchers))
        found[name] = found.get(name, frozenset()) | labels
    return found


def grouped(expr: str) -> frozenset[str]:
    """The labels by which an expression sums or joins."""
    lists = re.findall(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return frozenset(label.strip() for labels in lists for label in labels.split(",")) - {""}


def problems(expr: str, exported: Mapping[str, frozenset[str]]) -> list[str]:
    """Metrics and labels of an expression that no router exports."""
    found: list[str] = []
    known = set(ADDED)
    for name, labels in used(expr).items():
        if name not in exported:
            found.append(name)
            continue
        known |= exported[name]
        found += [f"{name}{{{label}}}" for label in sorted(labels - exported[name] - ADDED)]
    return found + [f"by {label}" for label in sorted(grouped(expr) - known)]

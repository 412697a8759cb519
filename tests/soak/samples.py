"""What a router holds at a moment, and how fast that grows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    """`at_s` counts from the beginning of the load."""

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int
    tasks: float
    streams: float
    booked: float
    connections: float
    index_blocks: float


# Gauges of /metrics that are summed over their labels.
_GAUGES = {
    "tasks": "headrace_tasks",
    "streams": "headrace_streams",
    "booked": "headrace_booked_legs",
    "connections": "headrace_http_connections",
    "index_blocks": "headrace_index_blocks",
}


def take(at_s: float, process: psutil.Process, page: str) -> Sample:
    """`page` is what `/metrics` said just now."""
    with process.oneshot():
        rss, threads = process.memory_info().rss / 1e6, process.num_threads()
    gauges = {name: gauge(page, metric) for name, metric in _GAUGES.items()}
    return Sample(at_s, rss, process.num_fds(), threads, **gauges)


def gauge(page: str, name: str) -> float:
    """The sum of a family's samples; a family that is not there is a KeyError."""
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    if not found and f"# TYPE {name} " not in page:
        raise KeyError(name)
    return sum(map(float, found))


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one measure: its middle in the first and in the last quarter, and the middle slope between any two samples."""

    first: float
    last: float
    per_hour: float


def trends(samples: Sequence[Sample]) -> dict[str, Trend]:
    """Of all measures. The slope is that of Theil and Sen: single peaks do not bend it."""
    quarter = max(1, len(samples) // 4)
    found: dict[str, Trend] = {}
    for field in fields(Sample):
        if field.name == "at_s":
            continue
        values = [float(getattr(sample, field.name)) for sample in samples]
        slopes = [
            (values[j] - values[i]) / (samples[j].at_s - samples[i].at_s)
            for i in range(len(values))
            for j in range(i + 1, len(values))
        ]
        found[field.name] = Trend(
            statistics.median(values[:quarter]),
            statistics.median(values[-quarter:]),
            3600 * statistics.median(slopes) if slopes else 0.0,
        )
    return found


def rows(samples: Sequence[Sample]) -> list[dict[str, float]]:
    return [{name: round(value, 3) for name, value in asdict(s).items()} for s in samples]

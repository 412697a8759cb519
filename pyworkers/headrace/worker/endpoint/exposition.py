"""The page of `/metrics`, in Prometheus' text format.

Names begin with `headrace_engine_`: the routers show workers as `headrace_worker_...`, and a sum counts none twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from headrace.version import VERSION
from headrace.worker.endpoint.totals import BOUNDS_S, Durations, SpanTotals
from headrace.worker.endpoint.watched import WorkerReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Samples of one name: what follows the name, labels, value."""

    name: str
    kind: str
    about: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def text(self) -> str:
        lines = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        for suffix, labels, value in self.samples:
            inner = ",".join(f'{key}="{text.translate(_ESCAPED)}"' for key, text in labels.items())
            lines.append(f"{self.name}{suffix}{f'{{{inner}}}' if inner else ''} {value:.17g}")
        return "\n".join(lines) + "\n"


def single(
    name: str, kind: str, about: str, value: float, labels: Mapping[str, str] | None = None
) -> MetricFamily:
    return MetricFamily(name, kind, about, (("", labels or {}, value),))


def page(families: Iterable[MetricFamily]) -> str:
    return "".join(family.text() for family in families)


def of_worker(report: WorkerReport | None) -> list[MetricFamily]:
    """What a worker says of itself; of one that does not serve yet only that."""
    ready = report is not None and report.joined > 0 and not report.draining
    info = {"version": VERSION}
    if report is not None:
        info |= {"worker": report.worker, "model": report.model, "role": report.role}
    families = [
        single("headrace_engine_info", "gauge", "What runs here; always 1.", 1, info),
        single("headrace_engine_ready", "gauge", "1 while it takes requests of a router.", ready),
    ]
    if report is None:
        return families
    return [
        *families,
        *_of_engine(report),
        *([] if report.spans is None else _of_spans(report.spans)),
    ]


def _of_engine(report: WorkerReport) -> list[MetricFamily]:
    load, totals = report.load, report.totals
    gauges = {
        "routers": (report.joined, "Routers that took the worker."),
        "running": (load.running, "Requests in the batch."),
        "waiting": (load.waiting, "Requests that wait for room in the batch."),
        "blocks": (report.blocks, "KV blocks of the pool."),
        "blocks_used": (load.blocks_used, "KV blocks that running requests hold."),
        "blocks_cached": (load.blocks_cached, "KV blocks that the prefix cache alone holds."),
    }
    counters = {
        "prompt_tokens": (totals.prompt_tokens, "Prompt tokens that were computed."),
        "cached_tokens": (totals.cached_tokens, "Prompt tokens of requests that ended, from the prefix cache."),
        "output_tokens": (totals.output_tokens, "Tokens that were generated."),
        "drafted_tokens": (totals.drafted_tokens, "Tokens that were drafted and checked."),
        "accepted_tokens": (totals.accepted_tokens, "Drafted tokens that became part of an answer."),
        "preemptions": (load.preemptions, "Times that a running request lost its blocks."),
    }  # fmt: skip
    return [
        *(single(f"headrace_engine_{name}", "gauge", about, n) for name, (n, about) in gauges.items()),
        *(
            single(f"headrace_engine_{name}_total", "counter", about, n)
            for name, (n, about) in counters.items()
        ),
        MetricFamily(
            "headrace_engine_requests_total",
            "counter",
            "Requests that ended, by how.",
            tuple(("", {"outcome": word}, n) for word, n in sorted(totals.ended.items())),
        ),
        _histogram("headrace_engine_step_seconds", "Steps, by how long each took.", totals.steps),
    ]  # fmt: skip


def _of_spans(spans: SpanTotals) -> list[MetricFamily]:
    return [
        single("headrace_engine_spans_exported_total", "counter", "Spans that the collector took.", spans.exported),
        MetricFamily(
            "headrace_engine_spans_dropped_total",
            "counter",
            "Spans that were lost, by why.",
            tuple(("", {"reason": word}, n) for word, n in sorted(spans.dropped.items())),
        ),
    ]  # fmt: skip


def _histogram(name: str, about: str, durations: Durations) -> MetricFamily:
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    below = list(accumulate(durations.counts))
    buckets = (("_bucket", {"le": le}, n) for le, n in zip(bounds, below, strict=True))
    sums = (("_sum", {}, durations.sum_s), ("_count", {}, below[-1]))
    return MetricFamily(name, "histogram", about, (*buckets, *sums))

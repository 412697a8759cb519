"""What spans tell of a leg, and what becomes of spans that a collector does not take."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.engine.result import EndedSequence, StepResult
from headrace.engine.sequence import Key
from headrace.errors import CannotRun, MissingExtra
from headrace.wire.frames import (
    Sampling,
    Submit,
    TraceContext,
    TransferBackend,
    TransferFailure,
    Transferred,
)
from headrace.worker.endpoint.totals import SpanTotals
from headrace.worker.log.request_log import WorkerLog
from headrace.worker.log.traces import queue as queue_module
from headrace.worker.log.traces.legs import LegSpans
from headrace.worker.log.traces.queue import SpanQueue
from headrace.worker.log.traces.start import Collector, collector_of, tracing
from helpers.engine.toy import make_submit
from helpers.serving.collector import collecting
from helpers.worker.fake_router import FakeRouter
from helpers.worker.scene import joined, running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT = TraceContext(f"00-{TRACE}-{PARENT}-01", "x=1,y@z=2")
NOW_NS = 1_700_000_000_000_000_000
KEY = Key(3, 9)


class Told:
    """A worker's log whose spans are kept in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.queue = SpanQueue(self.exporter)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        spans = LegSpans(provider, self.queue, "w", "m", wall_ns=lambda: NOW_NS)
        self.log = WorkerLog(worker="w", model="m", blocks=10, lines_per_s=0, spans=spans)

    def admitted(self, trace: TraceContext | None = KEPT) -> None:
        submit = Submit(9, b"\0" * 12, Sampling(), [], 4, request_id="r", trace=trace)
        self.log.admitted(KEY, submit, "router-a", 100.0)

    def ended(self, at_s: float, finish: str | None = "stop", error: str | None = None) -> None:
        ended = EndedSequence(
            key=KEY,
            prompt_tokens=20,
            cached_tokens=16,
            output_tokens=5,
            finish=finish,
            error=error,
            why=None if error is None else "x" * 300,
        )
        self.log.stepped(StepResult(ended=[ended]), at_s)

    def spans(self) -> dict[str, ReadableSpan]:
        self.queue.shutdown()
        spans = self.exporter.get_finished_spans()
        found = {span.name: span for span in spans}
        assert len(found) == len(spans)
        return found


@pytest.fixture
def told() -> Generator[Told]:
    told = Told()
    yield told
    told.queue.shutdown()


def times(span: ReadableSpan) -> tuple[int, int]:
    """From the end of the leg back, in ms."""
    assert span.start_time is not None
    assert span.end_time is not None
    return round((NOW_NS - span.start_time) / 1e6), round((NOW_NS - span.end_time) / 1e6)


def test_a_leg_has_its_times_under_the_routers_span(told: Told) -> None:
    told.admitted()
    told.log.stepped(StepResult(ms=50.0, admitted=[KEY]), 100.15)
    told.log.stepped(StepResult(ms=50.0, admitted=[KEY], begun=[KEY]), 100.3)  # once more
    told.ended(100.5)
    spans = told.spans()
    assert {name: times(span) for name, span in spans.items()} == {
        "worker leg": (500, 0),
        "queue": (500, 400),
        "prefill": (400, 200),
        "decode": (200, 0),
    }
    leg = spans.pop("worker leg")
    assert leg.parent is not None
    assert leg.context is not None
    assert f"{leg.parent.trace_id:032x} {leg.parent.span_id:016x}" == f"{TRACE} {PARENT}"
    assert leg.context.trace_state.to_header() == "x=1,y@z=2"
    assert leg.parent.is_remote
    for part in spans.values():
        assert part.parent is not None
        assert part.parent.span_id == leg.context.span_id
        assert part.kind is SpanKind.INTERNAL
    assert leg.kind is SpanKind.SERVER
    assert dict(leg.attributes or {}) == {
        "headrace.worker": "w",
        "gen_ai.request.model": "m",
        "headrace.request_id": "r",
        "headrace.leg": 9,
        "headrace.router": "router-a",
        "headrace.result": "stop",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert leg.status.status_code is StatusCode.UNSET
    [event] = leg.events
    assert (event.name, (NOW_NS - event.timestamp) / 1e6) == ("first_token", 200)


@pytest.mark.parametrize("trace", [None, TraceContext(f"00-{TRACE}-{PARENT}-00")])
def test_a_leg_whose_trace_nobody_keeps_has_no_span(told: Told, trace: TraceContext | None) -> None:
    told.admitted(trace)
    told.ended(101.0)
    assert told.spans() == {}


def test_kv_from_elsewhere_takes_the_place_of_a_prefill(told: Told) -> None:
    told.admitted()
    report = Transferred(9, "p-1", TransferBackend.SHM, 7, 7_000, 30.0, None)
    told.log.transferred(Key(3, 8), report, 100.05)  # of another request
    told.log.transferred(KEY, report, 100.1)
    told.log.stepped(StepResult(ms=20.0, admitted=[KEY], begun=[KEY]), 100.2)
    told.ended(100.5)
    spans = told.spans()
    assert {name: times(span) for name, span in spans.items()} == {
        "worker leg": (500, 0),
        "queue": (500, 320),
        "kv transfer": (430, 400),
        "decode": (320, 0),
    }
    assert dict(spans["kv transfer"].attributes or {}) == {
        "headrace.source": "p-1",
        "headrace.backend": "shm",
        "headrace.blocks": 7,
        "headrace.bytes": 7_000,
    }


def test_kv_that_does_not_come_is_an_error_of_the_transfer_and_the_prompt_is_computed(
    told: Told,
) -> None:
    told.admitted()
    report = Transferred(9, "p-1", None, 0, 0, 5_000.0, TransferFailure.TIMEOUT)
    told.log.transferred(KEY, report, 100.1)
    told.log.stepped(StepResult(ms=100.0, admitted=[KEY]), 100.3)
    told.ended(100.5)
    spans = told.spans()
    transfer = spans["kv transfer"]
    assert times(transfer) == (500, 400), "it began with its leg at the earliest"
    assert transfer.status.status_code is StatusCode.ERROR
    assert (transfer.attributes or {})["error.type"] == "timeout"
    assert "headrace.backend" not in (transfer.attributes or {})
    assert times(spans["prefill"]) == (300, 0), "no token came"
    assert "decode" not in spans
    assert spans["worker leg"].status.status_code is StatusCode.UNSET


def test_how_a_leg_can_end_otherwise() -> None:
    def end(how: str, told: Told) -> None:
        told.admitted()
        match how:
            case "failed":
                told.ended(100.5, finish=None, error="engine")
            case "cancelled":
                told.log.cancelled(KEY, 100.5)
            case "refused":
                submit = Submit(9, b"\0" * 12, Sampling(), [], 4, trace=KEPT)
                told.log.cancelled(KEY, 100.1)
                told.exporter.clear()
                told.log.refused(submit, "router-a", "queue_full", "no room", 100.5)
            case _:
                told.log.left(KEY.link + 1, 100.4)
                told.log.left(KEY.link, 100.5)

    for how, result, error, why in (
        ("failed", "engine", "engine", "x" * 256),
        ("cancelled", "cancelled", None, None),
        ("refused", "queue_full", "queue_full", "no room"),
        ("left", "router_left", "router_left", "router_left"),
    ):
        told = Told()
        end(how, told)
        told.queue.shutdown()
        spans = told.exporter.get_finished_spans()
        leg = [span for span in spans if span.name == "worker leg"][-1]
        said = dict(leg.attributes or {})
        assert (said["headrace.result"], said.get("error.type")) == (result, error), how
        assert (leg.status.status_code is StatusCode.ERROR) == (error is not None), how
        assert leg.status.description == why
        assert not leg.events
        queue = [span for span in spans if span.name == "queue"][-1]
        assert times(queue) == ((0, 0) if how == "refused" else (500, 0)), how


class Gated(SpanExporter):
    """Takes a batch once the test lets it, with what the test says."""

    def __init__(self) -> None:
        self.began, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.results: list[SpanExportResult | Exception] = []
        self.batches: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.release()
        assert self.gate.acquire(timeout=60)
        self.batches.append(len(spans))
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        if isinstance(result, Exception):
            raise result
        return result


def span() -> ReadableSpan:
    return ReadableSpan("span")


def test_a_full_queue_loses_what_comes_and_the_end_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_module, "GATHERING_S", 0.0)
    monkeypatch.setattr(queue_module, "LAST_SPANS_S", 0.0)
    exporter = Gated()
    queue = SpanQueue(exporter)
    queue.on_end(span())
    assert exporter.began.acquire(timeout=60), "the first batch is being sent"
    for _ in range(5_000):
        queue.on_end(span())
    assert queue.totals().dropped == {"queue_full": 5_000 - 4_096}
    queue.shutdown()
    assert queue.totals().dropped["shutdown"] == 4_096
    assert "did not take the last spans in time" in caplog.text
    queue.on_end(span())
    assert queue.totals().dropped["shutdown"] == 4_097
    exporter.gate.release()


def test_what_waits_is_sent_at_the_end_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("GATHERING_S", "LAST_SPANS_S"):  # a slow machine takes seconds for as many spans
        monkeypatch.setattr(queue_module, bound, 60.0)
    exporter = Gated()
    queue = SpanQueue(exporter)
    for _ in range(1_300):
        queue.on_end(span())
    for _ in range(3):
        exporter.gate.release()
    queue.shutdown()
    assert exporter.batches == [512, 512, 276]
    totals = queue.totals()
    assert (totals.exported, totals.dropped) == (1_300, {})


def test_that_spans_are_lost_is_told_once_until_they_are_taken_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_module, "GATHERING_S", 0.0)
    caplog.set_level(logging.INFO)
    failure, success = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    exporter = Gated()
    exporter.results = [failure, ValueError("broken"), success, failure]
    queue = SpanQueue(exporter)
    for _ in range(4):
        queue.on_end(span())
        assert exporter.began.acquire(timeout=60)
        exporter.gate.release()
    queue.shutdown()
    told = [record.getMessage() for record in caplog.records]
    assert sum("spans are lost" in line for line in told) == 2
    assert sum("takes spans again" in line for line in told) == 1
    totals = queue.totals()
    assert (totals.exported, totals.dropped) == (1, {"not_taken": 3})


ENDPOINT, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("flag", "variables", "url"),
    [
        (None, {}, None),
        ("", {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("https://[::1]:4318/otlp/", {}, "https://[::1]:4318/otlp/v1/traces"),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "True"}, None),
        (None, {TRACES: "http://c:1/own/path"}, "http://c:1/own/path"),
        ("http://v:1", {ENDPOINT: "http://v:1", TRACES: "http://t:1/t"}, "http://t:1/t"),
        ("http://flag:1", {ENDPOINT: "http://v:1", TRACES: "http://t:1/t"}, "http://flag:1/v1/traces"),
    ],
)  # fmt: skip
def test_where_spans_go(flag: str | None, variables: dict[str, str], url: str | None) -> None:
    found = collector_of(flag, variables)
    assert found == (None if url is None else Collector(url, 10.0))


def test_the_standards_timeout_is_in_ms_and_the_one_about_traces_counts() -> None:
    variables = {"OTEL_EXPORTER_OTLP_TIMEOUT": "250"}
    assert collector_of("http://c", variables) == Collector("http://c/v1/traces", 0.25)
    variables["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"] = "600000"
    assert collector_of("http://c", variables) == Collector("http://c/v1/traces", 600.0)


@pytest.mark.parametrize(
    ("flag", "variables", "named"),
    [
        ("c:4318", {}, "--otlp-endpoint"),
        ("grpc://c:4317", {}, "--otlp-endpoint"),
        ("http://", {}, "--otlp-endpoint"),
        ("http://c:4318?x=1", {}, "--otlp-endpoint"),
        ("http://a b", {}, "--otlp-endpoint"),
        ("http://c:port", {}, "--otlp-endpoint"),
        ("http://[::1", {}, "--otlp-endpoint"),
        ("http://user:pass@c:4318", {}, "--otlp-endpoint"),
        ("c", {ENDPOINT: "c"}, ENDPOINT),
        (None, {TRACES: "c"}, TRACES),
        ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ("http://c", {"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        ("http://c", {"OTEL_EXPORTER_OTLP_TIMEOUT": "600001"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        ("http://c", {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        ("http://c", {"OTEL_EXPORTER_OTLP_TIMEOUT": "9" * 5_000}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    flag: str | None, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(CannotRun) as refused:
        collector_of(flag, variables)
    assert str(refused.value).startswith(f"{named}: ")
    assert "pass" not in str(refused.value)


def test_without_a_collector_nothing_is_imported() -> None:
    program = (
        "import sys\n"
        "from headrace.worker.main import tracing\n"
        "with tracing(None, 'w', 'm') as spans: assert spans is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_library_the_flag_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra) as refused, tracing("http://c", "w", "m"):
        pass
    text = str(refused.value)
    assert text.startswith("--otlp-endpoint: opentelemetry is not installed"), text
    assert "headrace[cpu]" in text


async def test_a_worker_sends_the_spans_of_its_legs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,zone=b")
    with collecting() as collector:
        collector.statuses = [503]  # it is tried again
        with tracing(collector.url, "w", "m") as spans:
            assert spans is not None
            async with (
                FakeRouter(tmp_path / "r") as router,
                running(router, spans=spans) as worker,
            ):
                talk = await joined(router)
                talk.send(replace(make_submit(1, [1, 2, 3, 4, 5], max_tokens=6), trace=KEPT))
                await talk.until(lambda: talk.answer(1).finish is not None)
                found = await asyncio.to_thread(collector.until, lambda spans: len(spans) == 4)
                report = worker.worker.report()
        assert spans.queue.totals() == SpanTotals(exported=4)
    assert report.spans is not None
    assert {span.name for span in found} == {"worker leg", "queue", "prefill", "decode"}
    assert {(span.trace, span.state) for span in found} == {(TRACE, "x=1,y@z=2")}
    assert {span.service for span in found} == {"mine"}
    leg = next(span for span in found if span.name == "worker leg")
    assert (leg.parent, leg.events) == (PARENT, ["first_token"])
    assert leg.attributes["gen_ai.usage.output_tokens"] == 6
    assert f"tracing legs to {collector.url}/v1/traces" in caplog.text

"""What spans tell of a leg, made when it is over from the times that were noted: nothing here is reached by each token.

The names of attributes are those of OpenTelemetry's conventions where there are some, else those of the router's spans
(`router/src/request/spans.rs`). No text of anybody is in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headrace.version import VERSION
from headrace.wire.frames import TraceContext
from headrace.worker.log.leg import Leg, LegEnd
from headrace.worker.log.traces.queue import SpanQueue

MOST_CHARACTERS = 256  # of why something failed, as in the router's spans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A span under that of the leg."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, AttributeValue]
    error: str | None = None


class LegSpans:
    """Makes the spans of legs whose trace is kept."""

    def __init__(
        self,
        provider: TracerProvider,
        queue: SpanQueue,
        worker: str,
        model: str,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`queue` is what `provider` gives its spans to."""
        self.queue = queue
        self._tracer = provider.get_tracer("headrace-worker", VERSION)
        self._always = {"headrace.worker": worker, "gen_ai.request.model": model}
        self._wall_ns = wall_ns

    def ended(self, leg: Leg, end: LegEnd) -> None:
        """It is over, just now."""
        if leg.trace is None or not is_kept(leg.trace):
            return
        now_ns = self._wall_ns()

        def date_ns(at_s: float) -> int:
            return now_ns - round((end.at_s - at_s) * 1e9)

        span = self._tracer.start_span(
            "worker leg",
            _context_of(leg.trace),
            SpanKind.SERVER,
            self._always | _attributes(leg, end),
            start_time=date_ns(leg.came_s),
        )
        if leg.first_token_s is not None:
            span.add_event("first_token", timestamp=date_ns(leg.first_token_s))
        if end.error is not None:
            span.set_status(Status(StatusCode.ERROR, (end.why or end.error)[:MOST_CHARACTERS]))
        context = set_span_in_context(span)
        for part in _parts(leg, end.at_s):
            child = self._tracer.start_span(
                part.name, context, attributes=part.attributes, start_time=date_ns(part.began_s)
            )
            if part.error is not None:
                child.set_attribute("error.type", part.error)
                child.set_status(Status(StatusCode.ERROR))
            child.end(date_ns(part.ended_s))
        span.end(now_ns)


def is_kept(trace: TraceContext) -> bool:
    """Its traceparent says that the spans under it are to be kept."""
    return trace.parent.endswith("1")


def _context_of(trace: TraceContext) -> Context:
    headers = {"traceparent": trace.parent}
    if trace.state is not None:
        headers["tracestate"] = trace.state
    return TraceContextTextMapPropagator().extract(headers, Context())


def _attributes(leg: Leg, end: LegEnd) -> dict[str, AttributeValue]:
    known: dict[str, AttributeValue | None] = {
        "headrace.request_id": leg.request_id or None,
        "headrace.leg": leg.number,
        "headrace.router": leg.router,
        "headrace.result": end.error or end.finish,
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
        "gen_ai.usage.output_tokens": end.output_tokens,
        "gen_ai.response.finish_reasons": None if end.finish is None else (end.finish,),
        "error.type": end.error,
    }
    return {key: value for key, value in known.items() if value is not None}


def _parts(leg: Leg, ended_s: float) -> list[_Part]:
    """Where its time went. A prompt whose KV came from elsewhere has no prefill."""
    admitted_s = ended_s if leg.admitted_s is None else leg.admitted_s
    parts = [_Part(name="queue", began_s=leg.came_s, ended_s=admitted_s, attributes={})]
    has_kv = False
    if leg.transfer is not None:
        at_s, report = leg.transfer
        has_kv = report.error is None
        attributes: dict[str, AttributeValue] = {
            "headrace.source": report.worker,
            "headrace.blocks": report.blocks,
            "headrace.bytes": report.bytes,
        }
        if report.backend is not None:
            attributes["headrace.backend"] = str(report.backend)
        error = None if report.error is None else str(report.error)
        began_s = max(at_s - report.ms / 1e3, leg.came_s)
        parts.append(
            _Part(
                name="kv transfer",
                began_s=began_s,
                ended_s=at_s,
                attributes=attributes,
                error=error,
            )
        )
    if leg.admitted_s is None:
        return parts
    first_s = leg.admitted_s
    if not has_kv:
        first_s = ended_s if leg.first_token_s is None else leg.first_token_s
        parts.append(_Part(name="prefill", began_s=leg.admitted_s, ended_s=first_s, attributes={}))
    if first_s < ended_s:
        parts.append(_Part(name="decode", began_s=first_s, ended_s=ended_s, attributes={}))
    return parts

"""Spans on their way to the collector: a bounded queue, and a thread that sends them in batches.

OpenTelemetry's own batches drop the oldest spans when there is no room and count them nowhere. Here a span that finds
no room is lost, and `/metrics` says how many were: a collector that is slow or gone costs spans, and no request any
time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from headrace.worker.endpoint.totals import SpanTotals

log = logging.getLogger(__name__)

WAITING = 4_096  # spans, at most; a leg has four or so. A guess
BATCH = 512  # sent together at most, as OpenTelemetry has it
GATHERING_S = 1.0  # from the first span of a batch on others are waited for
LAST_SPANS_S = 1.0  # at the end of the process, for those that are left. A guess


class SpanQueue(SpanProcessor):
    """Takes spans that ended from any thread, and never waits."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._spans: deque[ReadableSpan] = deque()
        self._totals = SpanTotals()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def totals(self) -> SpanTotals:
        """As they are now."""
        with self._changed:
            return SpanTotals(self._totals.exported, self._totals.dropped.copy())

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Only its end counts."""

    def on_end(self, span: ReadableSpan) -> None:
        with self._changed:
            if self._closing or len(self._spans) >= WAITING:
                self._totals.dropped["shutdown" if self._closing else "queue_full"] += 1
                return
            self._spans.append(span)
            if len(self._spans) in (1, BATCH):
                self._changed.notify_all()

    def shutdown(self) -> None:
        """Send what waits, for at most `LAST_SPANS_S`; the rest is lost, and counted."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(LAST_SPANS_S)
        if not self._thread.is_alive():
            return
        self._exporter.shutdown()  # it tries no more
        with self._changed:
            self._totals.dropped["shutdown"] += len(self._spans)
            self._spans.clear()
        log.warning("the collector did not take the last spans in time")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002  the name is the library's
        """Nobody needs it: `shutdown` sends the rest."""
        return False

    def _run(self) -> None:
        losing = False
        while batch := self._next():
            taken = self._send(batch)
            with self._changed:
                if taken:
                    self._totals.exported += len(batch)
                else:
                    self._totals.dropped["not_taken"] += len(batch)
            if taken is losing:
                losing = not taken
                if losing:
                    log.warning(
                        "spans are lost: the collector does not take them; requests are served as before"
                    )
                else:
                    log.info("the collector takes spans again")
        self._exporter.shutdown()

    def _next(self) -> list[ReadableSpan]:
        """A batch; an empty one at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._spans or self._closing)
            self._changed.wait_for(
                lambda: len(self._spans) >= BATCH or self._closing, timeout=GATHERING_S
            )
            return [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]

    def _send(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("a batch of spans could not be sent")
            return False

"""A collector of OpenTelemetry over a real socket: keeps the spans that are sent to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SeenSpan:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    state: str
    kind: int
    nanos: tuple[int, int]
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


class FakeCollector:
    """Answers with the next of `statuses`, and with 200 from their end on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[SeenSpan] = []
        self.statuses: list[int] = []
        self._more = threading.Condition()

    def until(self, enough: Callable[[list[SeenSpan]], bool]) -> list[SeenSpan]:
        """All spans, once they are enough."""
        with self._more:
            there = self._more.wait_for(lambda: enough(self.spans), TIMEOUT_S)
            assert there, f"there are only {self.spans}"
            return list(self.spans)

    def take(self, body: bytes) -> int:
        with self._more:
            status = self.statuses.pop(0) if self.statuses else 200
            if status == 200:
                self.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self._more.notify_all()
            return status


@contextmanager
def collecting() -> Generator[FakeCollector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(collector.take(body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the library's
            """Not into the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = FakeCollector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _spans(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    return [
        SeenSpan(
            service=_attributes(of_resource.resource.attributes)["service.name"],
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            state=span.trace_state,
            kind=span.kind,
            nanos=(span.start_time_unix_nano, span.end_time_unix_nano),
            attributes=_attributes(span.attributes),
            events=[event.name for event in span.events],
            failed=span.status.code == 2,
        )
        for of_resource in request.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found

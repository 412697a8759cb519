"""Where a worker's spans go, and the library for that, which is imported only where there are spans."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.errors import CannotRun
from headrace.extras import needs
from headrace.version import VERSION

if TYPE_CHECKING:
    from headrace.worker.log.traces.legs import LegSpans

log = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
PROTOCOL = "http/protobuf"
PATH = "/v1/traces"
TIMEOUT_MS = 10_000  # the standard's own default
MOST_TIMEOUT_MS = 600_000  # a collector that takes longer is none. A guess


@dataclass(frozen=True, slots=True)
class Collector:
    """What takes spans, and how long one try to send some may take."""

    url: str
    timeout_s: float


def collector_of(flag: str | None, variables: Mapping[str, str]) -> Collector | None:
    """None: there are no spans. Raises `CannotRun` for what cannot be followed.

    `flag` is what was typed for `--otlp-endpoint`, or else its variable. The variable about traces holds a whole URL
    and goes before the one about everything; a flag goes before both. The router reads them in the same way
    (`router/src/config/traces.rs`).
    """
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    typed = flag if flag != variables.get(ENDPOINT) else None
    if not typed and (whole := variables.get(TRACES_ENDPOINT)):
        name, url = TRACES_ENDPOINT, whole
    elif flag:
        name, url = "--otlp-endpoint" if typed else ENDPOINT, flag.rstrip("/") + PATH
    else:
        return None
    check_url(name, url)
    name, protocol = _first(PROTOCOLS, variables, PROTOCOL)
    if protocol != PROTOCOL:
        raise CannotRun(
            f"{name}: {protocol!r} is not spoken here; set it to {PROTOCOL}, and the endpoint to the port for that "
            "(4318)"
        )
    name, text = _first(TIMEOUTS, variables, str(TIMEOUT_MS))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_TIMEOUT_MS):
        raise CannotRun(f"{name}: is {text!r}; it is a number of ms from 1 to {MOST_TIMEOUT_MS}")
    return Collector(url, int(text) / 1e3)


def _first(names: tuple[str, ...], variables: Mapping[str, str], default: str) -> tuple[str, str]:
    """The first of these variables that says something."""
    said = ((name, variables.get(name, "")) for name in names)
    return next((pair for pair in said if pair[1]), ("", default))


def check_url(name: str, url: str) -> None:
    """Raises `CannotRun` for what is no URL of a collector."""
    problem: str | None = None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        problem = f"{url!r} is not a URL ({error})"
    else:
        if "@" in parts.netloc:  # not repeated: it may be a password
            raise CannotRun(f"{name}: it has a user in it; OTEL_EXPORTER_OTLP_HEADERS is for that")
        if parts.scheme not in ("http", "https"):
            problem = f"{url!r} begins with neither http:// nor https://"
        elif not host or parts.query or any(c.isspace() for c in url):
            problem = f"{url!r} has no host, or a query"
    if problem is not None:
        raise CannotRun(f"{name}: {problem}; write a URL such as http://localhost:4318")


@contextmanager
def tracing(flag: str | None, worker: str, model: str) -> Generator[LegSpans | None]:
    """Makes the spans of legs, and sends the last of them at its end; None where there are none. Raises `CannotRun`."""
    collector = collector_of(flag, os.environ)
    if collector is None:
        yield None
        return
    with needs("cpu", "--otlp-endpoint"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        from headrace.worker.log.traces.legs import LegSpans
        from headrace.worker.log.traces.queue import SpanQueue
    # it has a line for each try that fails; `SpanQueue` says once that spans are lost
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    own = {
        "service.name": "headrace-worker",
        "service.version": VERSION,
        "service.instance.id": worker,
    }
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    # whether a trace is kept is what the router says
    provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
    queue = SpanQueue(OTLPSpanExporter(collector.url, timeout=collector.timeout_s))
    provider.add_span_processor(queue)
    log.info("tracing legs to %s", collector.url)
    try:
        yield LegSpans(provider, queue, worker, model)
    finally:
        queue.shutdown()

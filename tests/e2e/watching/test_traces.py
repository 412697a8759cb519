"""One trace of a request through the router and both workers of split serving, as a collector gets it."""

from __future__ import annotations

from pathlib import Path

from helpers.serving.collector import SeenSpan, collecting
from helpers.serving.server import serving

SECRET_WORD = "halibut"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SLACK_NS = 5_000_000  # times of two processes, each with its own way from one clock to the other


def test_a_split_request_is_one_trace(tiny_folder: Path) -> None:
    with collecting() as collector:
        split = ("--prefill", "1", "--decode", "1", "--policy", "round-robin")
        flags = (*split, "--otlp-endpoint", collector.url)
        with serving(str(tiny_folder), *flags) as server:
            body = {"model": server.model, "prompt": f"{SECRET_WORD} " * 20, "max_tokens": 6}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=1"}
            assert server.post("/v1/completions", body, headers).status == 200
            spans = collector.until(whole)
            unkept = {"traceparent": f"00-{'ab' * 16}-{PARENT}-00"}
            assert server.post("/v1/completions", body, unkept).status == 200
        assert collector.until(whole) == spans, "nobody keeps the second trace"
    assert all(span.nanos[0] <= span.nanos[1] for span in spans)
    assert {(span.trace, span.state) for span in spans} == {(TRACE, "x=1")}
    [request] = named(spans, "POST /v1/completions")
    assert (request.parent, request.service) == (PARENT, "headrace-router")
    legs = named(spans, "prefill leg") + named(spans, "decode leg")
    assert [leg.parent for leg in legs] == [request.id, request.id]
    for leg in legs:
        [theirs] = [span for span in named(spans, "worker leg") if span.parent == leg.id]
        assert theirs.service == "headrace-worker"
        for key in ("headrace.worker", "headrace.leg"):
            assert theirs.attributes[key] == leg.attributes[key]
        assert theirs.attributes["headrace.request_id"] == request.attributes["headrace.request_id"]
        assert leg.nanos[0] - SLACK_NS <= theirs.nanos[0] <= theirs.nanos[1]
        parts = {span.name for span in spans if span.parent == theirs.id}
        expected = "prefill" if leg.name == "prefill leg" else "kv transfer"
        assert parts >= {"queue", expected}, parts
    [transfer] = named(spans, "kv transfer")
    assert transfer.attributes["headrace.source"] == "prefill-0"
    assert transfer.attributes["headrace.bytes"] > 0
    assert not transfer.failed
    assert SECRET_WORD not in repr(spans)


def named(spans: list[SeenSpan], name: str) -> list[SeenSpan]:
    return [span for span in spans if span.name == name]


def whole(spans: list[SeenSpan]) -> bool:
    return len(named(spans, "worker leg")) == 2 and bool(named(spans, "POST /v1/completions"))

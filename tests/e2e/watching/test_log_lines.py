"""What a router and a worker tell of a request: the same names on both sides, no prompt unless it was asked for."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.server import Running, Server, eventually

SECRET_WORD = "halibut"
BOTH_TELL = {
    *("request", "model", "worker", "leg"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms"),
}
BOTH_SUM_UP = {"requests", "failed", "running", "waiting", "output_tokens_per_s", "kv_used"}


def told(process: Running, message: str) -> list[dict[str, Any]]:
    """The fields of each line with this message."""
    lines = (json.loads(line) for line in process.lines if line.startswith("{"))
    return [line["fields"] for line in lines if line["fields"]["message"] == message]


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Generator[tuple[Server, Running]]:
    """A router and a worker whose logs are JSON."""
    with ExitStack() as ended:
        log = ("--log-format", "json")
        router = Server("router", "--port", "0", "--worker-listen", "127.0.0.1:0", *log)
        ended.callback(router.close)
        line = router.wait_line(r"headrace-router: (http:\S+) for clients, (\S+) for workers")
        router.set_url(line[1])
        flags = ("--router", line[2], "--name", "w-0", "--served-model-name", "tiny")
        worker = Running("worker", str(tiny_folder), *flags, *log)
        ended.callback(worker.close)
        eventually(lambda: router.get("/ready").status == 200, worker.tail)
        yield router, worker


def test_both_sides_tell_of_a_request_by_the_same_names(pair: tuple[Server, Running]) -> None:
    router, worker = pair
    body = {"model": "tiny", "prompt": f"a {SECRET_WORD} b", "max_tokens": 5, "temperature": 0}
    assert router.post("/v1/completions", body, {"X-Request-ID": "told-of"}).status == 200
    router.wait_line('"request":"told-of"')
    worker.wait_line('"request finished"')
    [line] = [line for line in told(router, "request finished") if line["request"] == "told-of"]
    of_worker = told(worker, "request finished")
    [theirs] = [one for one in of_worker if one["request"] == "told-of"]
    assert set(line) >= BOTH_TELL | {"queue_ms", "tpot_ms", "status"}
    assert set(theirs) >= BOTH_TELL | {"tpot_ms", "router"}
    same = ("model", "prompt_tokens", "cached_tokens", "output_tokens", "worker", "leg")
    assert [line[name] for name in same] == [theirs[name] for name in same]
    assert SECRET_WORD not in router.tail(1_000) + worker.tail(1_000)


def test_a_request_that_is_refused_says_why_in_one_line(pair: tuple[Server, Running]) -> None:
    router, _ = pair
    forged = 'no-such\n{"level":"INFO"}\x1b[2J'
    body = {"model": forged, "prompt": "x"}
    assert router.post("/v1/completions", body, {"X-Request-ID": "refused"}).status == 404
    router.wait_line('"request":"refused"')
    [line] = [line for line in told(router, "request failed") if line["request"] == "refused"]
    assert (line["status"], line["error"]) == (404, "unknown_model")
    assert "does not exist" in line["why"]
    assert not any(line == '{"level":"INFO"}' for line in router.lines)


def test_ten_seconds_with_work_are_summed_up_on_both_sides(pair: tuple[Server, Running]) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5}
    assert pair[0].post("/v1/completions", body).status == 200
    for side in pair:
        eventually(lambda side=side: any(told_of(side)), side.tail)
        assert set(told(side, "the last 10 s")[0]) >= BOTH_SUM_UP


def told_of(side: Server | Running) -> list[int]:
    """Requests that ended, of each ten seconds that had work: the first may have none that ended."""
    return [one["requests"] + one["failed"] for one in told(side, "the last 10 s")]


def test_prompts_are_told_where_they_were_asked_for(pair: tuple[Server, Running]) -> None:
    with ExitStack() as ended:
        router = Server(
            *("router", "--port", "0", "--worker-listen", "127.0.0.1:0"),
            *("--log-prompts", "--log-requests-per-s", "1000"),
        )
        ended.callback(router.close)
        line = router.wait_line(r"headrace-router: (http:\S+) for clients, (\S+) for workers")
        router.set_url(line[1])
        mock = Running("mock", "--router", line[2], "--workers", "1", "--model", "mock")
        ended.callback(mock.close)
        eventually(lambda: router.get("/ready").status == 200, mock.tail)
        body = {"model": "mock", "prompt": f"first\nthen a {SECRET_WORD}", "max_tokens": 3}
        assert router.post("/v1/completions", body).status == 200
        found = router.wait_line(r"request finished .* prompt=(\".*\")$")
        assert SECRET_WORD in found[1] and "\\n" in found[1], "one line, whatever the prompt holds"

"""An answer says how it came about, and the command `explain` says it to a person."""

from __future__ import annotations

import json
import re

import pytest

from headrace.cli import main
from helpers.serving.server import Server

STAGES = ("tokenise", "queue", "route", "prefill", "first-token")


def test_a_prompt_that_comes_again_is_explained_by_its_cache(
    tiny: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = list(range(10, 170))
    body = {"model": tiny.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    tiny.post("/v1/completions", body)
    tiny.wait_idle()
    headers = {"X-Headrace-Explain": "1", "X-Request-ID": "e2e/explained"}
    reply = tiny.post("/v1/completions", body, headers)
    assert reply.status == 200
    timing = dict(re.findall(r"([\w-]+);dur=([\d.]+)", reply.headers["server-timing"]))
    assert tuple(timing) == STAGES
    decision = json.loads(reply.headers["x-headrace-decision"])
    assert decision["winner"] == reply.headers["x-headrace-worker"]
    [candidate] = decision["candidates"]
    assert candidate["cached_tokens"] > 0

    assert main.main(["explain", "e2e/explained", "--url", tiny.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "request e2e/explained"
    assert f"{decision['policy']} chose {decision['winner']}" in lines
    cached = f"{candidate['cached_tokens']:,}"
    [chosen] = [line for line in lines if line.startswith("->")]
    assert chosen.split()[:3] == ["->", decision["winner"], cached]
    [outcome] = [line for line in lines if line.startswith("what happened")]
    assert outcome.endswith("in the router's queue: finished (length)")
    assert f"cached tokens {cached} {cached}".split() in [line.split() for line in lines]
    [tokens] = [line for line in lines if line.startswith("output tokens")]
    assert tokens.split()[-1] == "4"
    [legend] = [line for line in lines if line.startswith("saturation: ")]
    assert "KV blocks which this request keeps" in legend


def test_a_deadline_that_cannot_be_met_is_429_with_a_time_to_come_back(tiny: Server) -> None:
    prompt = [10 + i % 200 for i in range(4_000)]
    body = {"model": tiny.model, "prompt": prompt, "max_tokens": 4}
    tiny.post("/v1/completions", body)  # now it is known what a step takes
    body["prompt"] = prompt[::-1]
    reply = tiny.post("/v1/completions", body, {"X-Headrace-TTFT-Deadline-Ms": "1"})
    assert reply.status == 429
    assert reply.json["error"]["code"] == "deadline_impossible"
    assert int(reply.headers["retry-after"]) >= 1

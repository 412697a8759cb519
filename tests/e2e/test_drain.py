"""`headrace drain` on real processes: what a worker cached is not lost, and what it ran goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.server import Running, Server, eventually, serving


def drain(server: Server, worker: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    running = Running("drain", worker, "--url", server.url, "--json", *flags)
    try:
        status = running.wait(90)
        return status, json.loads("\n".join(running.lines).removesuffix("<end of output>"))
    finally:
        running.close()


def rest(events: Iterator[str]) -> str:
    text = ""
    for event in events:
        if event == "[DONE]":
            return text
        text += json.loads(event)["choices"][0]["text"]
    raise AssertionError(f"the stream ended after {text[-50:]!r}")


def complete(server: Server, prompt: str) -> dict[str, Any]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return reply.json


@pytest.fixture(scope="module")
def two_workers(tiny_folder: Path) -> Generator[Server]:
    with serving(str(tiny_folder), "--workers", "2") as server:
        yield server


def test_streams_of_a_drained_worker_go_on_unbroken(two_workers: Server) -> None:
    server = two_workers
    body = {
        "model": server.model,
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "temperature": 0,
        "ignore_eos": True,
    }
    with server.stream("/v1/completions", body) as events:
        undisturbed = rest(events)
    with server.stream("/v1/completions", body) as events:
        begin = json.loads(next(events))["choices"][0]["text"]
        busy = next(name for name, worker in server.workers().items() if worker["in_flight"])
        ready = rf"{busy} +\| ready, serves"
        starts = sum(re.search(ready, line) is not None for line in server.lines)
        status, report = drain(server, busy, "--budget", "0s", "--hand-over", "0")
        assert begin + rest(events) == undisturbed
    assert status == 0, report
    assert report["left_in_time"] is True
    assert report["requests"] == {"running": 1, "finished": 0, "moved": 1}
    assert report["hand_over"]["outcome"] == "not_asked"
    # the supervisor starts it anew, and nobody holds that against it
    server.wait_line(ready, times=starts + 1)
    assert server.workers()[busy]["state"] == "ready"
    nobody = Running("drain", "nobody", "--url", server.url)
    nobody.wait_line("no worker here is called `nobody`", timeout=60)
    assert nobody.wait() == 1
    nobody.close()


def test_the_hottest_blocks_of_a_drained_worker_are_served_by_others(two_workers: Server) -> None:
    server = two_workers
    prompts = [f"Story number {n} begins like this, as all of them do. " * 6 for n in range(6)]
    for _ in range(2):
        for prompt in prompts:
            complete(server, prompt)
    server.wait_idle()
    cached = {name: worker["blocks_cached"] for name, worker in server.workers().items()}
    leaving = max(cached, key=lambda name: cached[name])
    staying = next(name for name in cached if name != leaving)
    status, report = drain(server, leaving, "--budget", "60s")
    assert status == 0, report
    over = report["hand_over"]
    assert over["outcome"] == "done", report
    assert over["blocks_offered"] > 0
    assert over["hit_rate_kept"] == 1.0, report
    assert [successor["worker"] for successor in over["successors"]] == [staying]
    assert report["seconds"] < 60, "an idle worker leaves as soon as its blocks are gone"
    # while the drained one is away or empty, the other one serves all prompts from what it took over
    for prompt in prompts:
        usage = complete(server, prompt)["usage"]
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached_tokens >= usage["prompt_tokens"] - 32, usage


def test_serve_starts_both_roles_and_prints_a_url_that_works_at_once(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), "--prefill", "1", "--decode", "1") as server:
        assert complete(server, "Once upon a time")["usage"]["completion_tokens"] == 4
        assert server.get("/ready").status == 200
        workers = eventually(server.workers, lambda: "no workers")
        roles = {name: worker["role"] for name, worker in workers.items()}
        assert roles == {"prefill-0": "prefill", "decode-0": "decode"}
        server.wait_idle()

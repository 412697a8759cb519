"""The first start of a worker times its steps. Routers go by that at first, and then by what steps show."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.serving.server import Server

SAID_MS = 4_321.0  # of a step, which really takes a few ms


@contextmanager
def server(folder: Path, cache: Path) -> Generator[Server]:
    started = Server("serve", str(folder), "--port", "0", env={"HEADRACE_CACHE": str(cache)})
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()


def only_worker(started: Server) -> dict[str, Any]:
    [worker] = started.workers().values()
    return worker


def test_a_router_goes_by_what_was_timed_and_then_by_what_it_sees(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with server(tiny_folder, tmp_path) as first:
        [file] = (tmp_path / "steps").glob("*.json")
        kept = json.loads(file.read_text())
        worker = only_worker(first)
        assert worker["steps_learnt"] == 0
        assert worker["step_cost"]["fixed_ms"] == kept["cost"]["fixed_ms"]
        assert worker["step_cost"]["prefill_ms"] == kept["cost"]["prefill_ms"]
    kept["cost"]["fixed_ms"] = SAID_MS
    file.write_text(json.dumps(kept))
    with server(tiny_folder, tmp_path) as second:
        assert only_worker(second)["step_cost"]["fixed_ms"] == SAID_MS
        body = {"model": second.model, "prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True}
        reply = second.post("/v1/completions", body, {"X-Headrace-Explain": "1"})
        assert reply.status == 200
        [candidate] = json.loads(reply.headers["x-headrace-decision"])["candidates"]
        assert SAID_MS < candidate["prefill_ms"] < 2 * SAID_MS  # one step
        assert 4 * SAID_MS <= candidate["decode_ms"] < 5 * SAID_MS  # four more
        for _ in range(20):
            assert second.post("/v1/completions", body).status == 200
        second.wait_idle()
        worker = only_worker(second)
        assert worker["steps_learnt"] > 20
        assert worker["step_cost"]["fixed_ms"] < SAID_MS / 4, "a wrong prior is forgotten"

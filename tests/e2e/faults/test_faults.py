"""Clients that hang up, workers that die, and no worker at all."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.serving.server import Server, eventually, serving

LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def long_chat(server: Server, tokens: int, content: str = "hello") -> dict[str, Any]:
    return LONG | {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
    }


def text_of(events: Iterable[str]) -> str:
    """What a whole stream said; it must have come to its end."""
    *chunks, done = events
    assert done == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.fixture(scope="module")
def two_workers(tiny_folder: Path) -> Generator[Server]:
    # under kv equal prompts go where they are cached, and here every worker is to get some
    with serving(str(tiny_folder), "--workers", "2", "--policy", "round-robin") as server:
        yield server


@pytest.fixture(scope="module")
def lone_worker(tiny_folder: Path) -> Generator[Server]:
    with serving(str(tiny_folder)) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tiny_folder: Path) -> Generator[Server]:
    """One worker, whose restart takes longer than requests wait for it."""
    with serving(str(tiny_folder), "--queue-timeout-ms", "50") as server:
        yield server


def starts_of(server: Server, worker: str) -> int:
    return sum(re.search(rf"{worker} +\| ready", line) is not None for line in server.lines)


def test_a_hang_up_frees_the_blocks(real: Server) -> None:
    body = long_chat(real, 4_000)  # a minute of work
    with real.stream("/v1/chat/completions", body) as events:
        for _ in range(4):
            next(events)
        eventually(
            lambda: real.workers()["worker-0"]["running"] == 1,
            lambda: f"it does not run: {real.workers()}",
        )
    real.wait_idle(timeout=30)  # less than its answer takes


def test_a_client_that_is_closed_by_the_openai_library_cancels_too(real: Server) -> None:
    stream = real.client.chat.completions.create(
        model=real.model,
        messages=[{"role": "user", "content": "Tell a very long story."}],
        max_tokens=4_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    real.wait_idle()


def test_a_worker_that_dies_before_the_first_byte_is_replaced(two_workers: Server) -> None:
    server = two_workers
    body = long_chat(server, 8)
    expected = server.post("/v1/chat/completions", body).json["choices"]
    victim = server.worker_process("worker-0")
    starts = starts_of(server, "worker-0")
    victim.suspend()  # it takes requests and answers nothing
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(server.post, "/v1/chat/completions", body) for _ in range(8)]
        concurrent.futures.wait(sent, 60, concurrent.futures.FIRST_COMPLETED)
        eventually(
            lambda: server.workers()["worker-1"]["running"] == 0,
            lambda: f"worker-1 does not finish: {server.workers()}",
        )
        held = [request for request in sent if not request.done()]
        victim.kill()
        replies = [request.result(60) for request in sent]
    assert held, "no request was on the worker that was stopped"
    assert [reply.status for reply in replies] == [200] * 8
    assert all(reply.json["choices"] == expected for reply in replies)
    server.wait_line(r"worker-0 +\| ready", times=starts + 1)


def test_a_lone_worker_that_dies_mid_stream_goes_on_with_it_when_it_is_back(
    lone_worker: Server,
) -> None:
    server = lone_worker
    body = long_chat(server, 600)
    with server.stream("/v1/chat/completions", body) as events:
        undisturbed = text_of(events)
    with server.stream("/v1/chat/completions", body) as events:
        first = next(events)
        with server.frozen("worker-0") as worker:
            worker.kill()
        assert text_of([first, *events]) == undisturbed
    server.wait_line(r"worker-0 +\| was killed by SIGKILL.*starting again")


def test_a_worker_that_does_not_come_back_in_time_ends_its_stream_with_an_error(
    impatient: Server,
) -> None:
    server, starts = impatient, starts_of(impatient, "worker-0")
    with server.stream("/v1/chat/completions", long_chat(server, 6_000)) as events:
        next(events)
        with server.frozen("worker-0") as worker:
            worker.kill()
        rest = list(events)
    assert "[DONE]" not in rest
    assert json.loads(rest[-1])["error"]["message"]
    server.wait_line(r"worker-0 +\| ready", times=starts + 1)
    assert server.post("/v1/chat/completions", long_chat(server, 4)).status == 200


def test_without_a_worker_it_is_503_with_a_time_to_come_back(impatient: Server) -> None:
    """The worker is gone and its restart takes seconds: requests are told so."""
    import openai

    server, starts = impatient, starts_of(impatient, "worker-0")
    model = server.model
    body = long_chat(server, 4)
    server.worker_process("worker-0").kill()
    eventually(
        lambda: not any(w["state"] == "ready" for w in server.workers().values()),
        lambda: f"still there: {server.workers()}",
    )
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert server.get("/ready").status == 503
    assert server.get("/health").status == 200
    with pytest.raises(openai.InternalServerError):
        server.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], stream=True
        )
    server.wait_line(r"worker-0 +\| ready", times=starts + 1)
    assert server.post("/v1/chat/completions", body).status == 200


def test_workers_tell_their_load(two_workers: Server) -> None:
    workers = two_workers.workers()
    assert set(workers) == {"worker-0", "worker-1"}
    for worker in workers.values():
        assert worker["role"] == "both"
        assert worker["blocks_total"] > 0
        for name in ("state", "blocks_used", "blocks_cached", "running", "waiting"):
            assert name in worker


def test_the_router_dies_and_everything_comes_back(lone_worker: Server) -> None:
    server = lone_worker
    body = long_chat(server, 4)
    before = server.post("/v1/chat/completions", body).json["choices"]
    router = next(child for child in server.children() if "router" in child.cmdline())
    router.kill()
    server.wait_line(r"router +\| was killed by SIGKILL")

    def answered() -> Any:
        try:
            reply = server.post("/v1/chat/completions", body)
        except OSError:
            return None
        return reply if reply.status == 200 else None

    reply = eventually(answered, server.tail, timeout=60)
    assert reply.json["choices"] == before

"""A worker is killed in the middle of a call that has to come: its deltas go on as if nothing had happened."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest

from helpers.serving.server import Server, eventually, serving

PARAMETERS = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 10, "maxLength": 60},
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 8, "maxLength": 30},
            "minItems": 3,
            "maxItems": 6,
        },
    },
    "required": ["title", "lines"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a short poem about a river, with a title."}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "write_poem", "strict": True, "parameters": PARAMETERS},
        }
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0.8,
    "seed": 11,
    "max_tokens": 300,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with serving(None, "--workers", "2") as server:
        yield server


def deltas(server: Server, *, then: Callable[[str, int], None]) -> list[Any]:
    """The call as it came, but for its id, which is drawn; `then` gets the worker and how many deltas there were."""
    body = json.dumps(BODY | {"model": server.model})
    with closing(http.client.HTTPConnection(server.host, server.port, timeout=120)) as connection:
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        worker = answer.headers["X-Headrace-Worker"]
        said: list[Any] = []
        for line in answer:
            if not line.startswith(b"data: {"):
                done = line.startswith(b"data: [DONE]")
                said += ["done"] if done else []
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls", ()):
                    said.append(call["function"])
                    then(worker, len(said))
                said += [choice["finish_reason"]] if choice["finish_reason"] else []
            said += [event["usage"]["completion_tokens"]] if event.get("usage") else []
    return said


def arguments(said: list[Any]) -> str:
    return "".join(call.get("arguments", "") for call in said if isinstance(call, dict))


def test_a_call_goes_on_byte_for_byte(server: Server) -> None:
    undisturbed = deltas(server, then=lambda _worker, _count: None)
    written = json.loads(arguments(undisturbed))
    assert undisturbed[-1] == "done"
    assert "tool_calls" in undisturbed
    assert 3 <= len(written["lines"]) <= 6
    calls = sum(isinstance(call, dict) for call in undisturbed)
    assert calls > 12, "too few deltas to be killed between two of them"
    for position in (2, calls // 2):
        killed: list[str] = []

        def kill(
            worker: str, count: int, position: int = position, killed: list[str] = killed
        ) -> None:
            if count == position:
                killed.append(worker)
                server.worker_process(worker).kill()

        disturbed = deltas(server, then=kill)
        assert killed, f"no delta {position}"
        # steps of the second worker may cut the text elsewhere; what is said is the same
        assert arguments(disturbed) == arguments(undisturbed), (
            f"killed {killed} at delta {position}"
        )
        assert [one for one in disturbed if not isinstance(one, dict)] == [
            one for one in undisturbed if not isinstance(one, dict)
        ]
        eventually(
            lambda: [w["state"] for w in server.workers().values()] == ["ready", "ready"],
            lambda: f"{server.workers()}",
            120,
        )
    page = server.get("/metrics").body.decode()
    resumed = [line for line in page.splitlines() if line.startswith("headrace_resumes_total")]
    assert resumed
    assert sum(float(line.rsplit(" ", 1)[1]) for line in resumed) == 2

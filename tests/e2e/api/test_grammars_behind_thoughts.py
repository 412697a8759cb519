"""Grammars and budgets behind each way to mark reasoning, over HTTP: what the answer is, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA}}
JSON = '{"city": "Basel"}'
THOUGHT = "Is <it> [so]? é"
ANSWERS = {
    "think": f"<think>\n{THOUGHT}\n</think>\n\n{JSON}",
    "mistral": f"[THINK]{THOUGHT}[/THINK]{JSON}",
    "gemma": f"<|channel>thought\n{THOUGHT}<channel|>{JSON}",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{JSON}",
}
SHOWN = {
    "think": "</think>",
    "mistral": "[THINK]",
    "gemma": "<|channel>thought",
    "harmony": "<|channel|>analysis",
}
FUNCTION: dict[str, Any] = {"name": "go", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    answers = [
        {"text": text, "when": f"by {name}!", "tokens_per_step": 2, "pieces": "characters"}
        for name, text in ANSWERS.items()
    ]
    folder = tmp_path_factory.mktemp("thoughts")
    with scripted(folder, answers, "--allow-request-templates") as server:
        yield server


def ask(server: Server, name: str, **more: Any) -> Any:
    shown = SHOWN.get(name, "")
    return server.post(
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"by {name}!"}],
            "chat_template": "{{ messages[0].content }}{% if tools and false %}"
            f"{shown}{{% endif %}}",
            **more,
        },
    )


@pytest.mark.parametrize("more", [{}, {"max_reasoning_tokens": 30}])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_schema_holds_what_stands_behind_the_thought(
    server: Server, name: str, more: dict[str, Any]
) -> None:
    reply = ask(server, name, response_format=FORMAT, **more)
    assert reply.status == 200, reply.body
    message = reply.json["choices"][0]["message"]
    assert message["reasoning_content"] == THOUGHT
    assert json.loads(message["content"]) == json.loads(JSON)
    details = reply.json["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] >= len(THOUGHT), "a character is a token"
    streamed = ask(server, name, response_format=FORMAT, stream=True, **more)
    lines = streamed.body.decode().splitlines()
    deltas = [
        choice["delta"]
        for line in lines
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    ]
    for field in ("content", "reasoning_content"):
        text = "".join(delta.get(field) or "" for delta in deltas)
        assert text == message[field]


def refused(reply: Any) -> tuple[int, str, str]:
    return reply.status, reply.json["error"]["param"], reply.json["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [{"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}],
)
def test_no_budget_stands_beside_calls_in_channels_that_are_held_to_schemas(
    server: Server, more: dict[str, Any]
) -> None:
    template = "{{ messages[0].content }}{{ tools }}{% if false %}<|channel|>analysis<|constrain|>{% endif %}"
    without = ask(server, "harmony", **more, chat_template=template)
    assert without.status == 200, without.body
    reply = ask(server, "harmony", **more, max_reasoning_tokens=5, chat_template=template)
    status, param, message = refused(reply)
    assert (status, param) == (400, "max_reasoning_tokens")
    assert "calls" in message


def test_a_budget_without_reasoning_is_refused(server: Server) -> None:
    status, param, message = refused(ask(server, "plain", max_reasoning_tokens=5))
    assert (status, param) == (400, "max_reasoning_tokens")
    assert "--reasoning-parser" in message


@pytest.mark.parametrize("most", [-1, 1.5, "five", True])
def test_a_budget_is_a_count(server: Server, most: Any) -> None:
    status, param, _ = refused(ask(server, "think", max_reasoning_tokens=most))
    assert (status, param) == (400, "max_reasoning_tokens")

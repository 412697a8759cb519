"""A worker is killed in an answer that follows a schema, in reasoning with a budget, within the marker that ends it,
and in a call that has to come: streams and whole answers are byte for byte those of the undisturbed run.

The model has no tokens for the markers of reasoning: it writes them in several ones, and so they are cut in two, too.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from chaos.fleet import Fleet
from chaos.plan import Shape
from helpers.models.tiny_model import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 4, "maxLength": 12},
        "days": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
CALL = {
    "tools": [{"type": "function", "function": {"name": "plan", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
BUDGET = 5
LESS = str(tiny_tokenizer()["model"]["vocab"]["<"])
MARKER = "</think>"
MARKER_TOKENS = ["<", "/", "th", "in", "k", ">"]  # the longest that write it
# Reasoning takes the tokens 1 to 5, its marker 6 to 11; then comes what it is for.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    # an answer that begins with the marker would reason for as long as it likes
    "a schema": ("talk", {"response_format": FORMAT, "logit_bias": {LESS: -100}}, (1, 9, 20)),
    "a budget and a schema": (
        "think",
        {"response_format": FORMAT, "max_reasoning_tokens": BUDGET},
        (3, 5, 7, 9, 11, 20),
    ),
    "a budget": (
        "think",
        {"max_reasoning_tokens": BUDGET, "ignore_eos": True, "max_tokens": 40},
        (2, 8, 15),
    ),
    "a call": ("talk", {**CALL, "max_reasoning_tokens": BUDGET}, (2, 14, 40)),
    "a budget and a call": ("think", {**CALL, "max_reasoning_tokens": BUDGET}, (4, 10, 30)),
}
DRAWS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 77}}
OPENS = "{% if messages[-1]['content'] == 'think' %}<think>{% endif %}"


def spelling_llama(folder: Path) -> Path:
    """Its template opens the reasoning where the last message says `think`."""
    tiny_llama(folder, max_position_embeddings=2048)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    config["chat_template"] = template.replace("assistant\\n' }}", f"assistant\\n' }}}}{OPENS}")
    assert config["chat_template"] != template
    path.write_text(json.dumps(config))
    return folder


SHAPES = {
    "one leg": Shape(prefill=0, decode=0, both=2, hosts=False),
    "two legs": Shape(prefill=1, decode=2, both=0, hosts=False),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=SHAPES)
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncGenerator[Fleet]:
    folder = tmp_path_factory.mktemp("structured")
    flags = ["--policy=round-robin", "--reasoning-parser=think"]
    model = spelling_llama(folder / "model")
    async with Fleet(SHAPES[request.param], model, folder, router_flags=flags) as fleet:
        yield fleet
    assert fleet.crashes == []


def body_of(fleet: Fleet, name: str, draw: str) -> dict[str, Any]:
    prompt, more, _ = CASES[name]
    messages = [{"role": "user", "content": prompt}]
    common = {"model": fleet.model, "messages": messages, "max_tokens": 400, "seed": 5}
    return common | DRAWS[draw] | more


def asked(port: int, body: dict[str, Any]) -> Any:
    """The message with why it ended and its tokens, but for ids, which are drawn."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
        answer = connection.getresponse()
        data = answer.read()
    assert answer.status == 200, data
    return streamed(data) if body.get("stream") else whole(json.loads(data))


def whole(reply: Any) -> Any:
    choice = reply["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    texts = [message.get("reasoning_content") or "", message.get("content") or ""]
    return [*texts, calls, choice["finish_reason"], counts(reply["usage"])]


def streamed(data: bytes) -> Any:
    texts = {"reasoning_content": "", "content": ""}
    calls: list[dict[str, str]] = []
    finish = usage = None
    lines = data.decode().splitlines()
    assert lines[-2] == "data: [DONE]", lines[-4:]
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(calls):
                    calls.append({"name": "", "arguments": ""})
                for name, text in call["function"].items():
                    calls[call["index"]][name] += text
    return [*texts.values(), calls, finish, counts(usage)]


def counts(usage: Any) -> list[int]:
    details = usage["completion_tokens_details"] or {}
    return [usage["prompt_tokens"], usage["completion_tokens"], details.get("reasoning_tokens", 0)]


def check(name: str, answer: Any) -> None:
    """The undisturbed answer is what it is to be."""
    reasoning, content, calls, finish, (_, tokens, reasoned) = answer
    prompt, more, _ = CASES[name]
    if prompt == "think":
        assert reasoned == BUDGET + len(MARKER_TOKENS), "and what ends it"
        assert reasoning
    if "tools" in more:
        assert (finish, len(calls), content) == ("tool_calls", 1, "")
        jsonschema.validate(json.loads(calls[0]["arguments"]), SCHEMA)
    elif "response_format" in more:
        assert finish == "stop"
        jsonschema.validate(json.loads(content), SCHEMA)
    else:
        assert (finish, tokens) == ("length", 40)
        assert MARKER not in content


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", CASES)
async def test_killed_in_the_middle(fleet: Fleet, name: str, draw: str) -> None:
    body = body_of(fleet, name, draw)
    expected = await asyncio.to_thread(asked, fleet.port, body)
    check(name, expected)
    for position in CASES[name][2]:
        for stream in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            trap = await fleet.trap(f"token {position}", "kill", body["seed"])
            answer = asyncio.create_task(asyncio.to_thread(asked, fleet.port, body | options))
            await trap.sprung()
            assert await answer == expected, f"killed at token {position}, {options}"
            await fleet.ready()

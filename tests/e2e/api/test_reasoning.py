"""`max_reasoning_tokens` and calls behind reasoning, on a real worker whose model has tokens for both."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from helpers.models.tiny_model import tiny_llama, tiny_tokenizer
from helpers.serving.server import Server, serving

MARKS = ("<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
OPENS = " {% if messages[-1]['content'] == 'think' %}<think>{% endif %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Random weights; a prompt that says `think` has the reasoning opened by the template."""
    folder = thinking_llama(tmp_path_factory.mktemp("thinking"))
    with serving(str(folder), "--reasoning-parser", "think") as server:
        yield server


def thinking_llama(folder: Path) -> Path:
    tokenizer = tiny_tokenizer()
    first = len(tokenizer["model"]["vocab"])
    tiny_llama(folder, vocab_size=first + len(MARKS), max_position_embeddings=2048)
    model = dict(tokenizer["added_tokens"][0])
    for at, mark in enumerate(MARKS):
        added = {**model, "id": first + at, "content": mark, "special": False}
        tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace(
        "assistant\\n' }}", f"assistant\\n' }}}}{OPENS}"
    )
    assert OPENS in config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ask(server: Server, prompt: str, **more: Any) -> tuple[dict[str, Any], str, int, int]:
    """The message, why it ended, its tokens, and those of reasoning; the same streamed and whole."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1,
        "max_tokens": 40,
        "ignore_eos": True,
        **more,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    choice, usage = reply.json["choices"][0], reply.json["usage"]
    streamed = server.post(
        "/v1/chat/completions",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    lines = streamed.body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    for name in ("content", "reasoning_content"):
        text = "".join(
            choice["delta"].get(name) or "" for event in events for choice in event["choices"]
        )
        assert text == (choice["message"].get(name) or ""), name
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    return choice["message"], choice["finish_reason"], usage["completion_tokens"], counted


@pytest.mark.parametrize("most", [0, 1, 6])
def test_a_budget_ends_reasoning_that_the_prompt_opened(server: Server, most: int) -> None:
    for seed in range(4):
        message, finish, tokens, counted = ask(
            server, "think", max_reasoning_tokens=most, seed=seed
        )
        assert 1 <= counted <= most + 1, "the tokens of the thought, and the one that ends it"
        assert (finish, tokens) == ("length", 40)
        assert message["content"]
        assert most or "reasoning_content" not in message


def test_without_a_budget_the_thought_goes_on(server: Server) -> None:
    counts = [ask(server, "think", seed=seed)[3] for seed in range(3)]
    assert max(counts) > 7, "random tokens seldom end it"


def test_nothing_is_counted_where_nothing_is_thought(server: Server) -> None:
    for seed in range(3):
        _, _, _, counted = ask(server, "talk", seed=seed, logit_bias={})
        assert counted == 0


@pytest.mark.parametrize("prompt", ["think", "talk"])
def test_a_call_that_has_to_be_stands_behind_the_thought(server: Server, prompt: str) -> None:
    for seed in range(3):
        message, finish, _, counted = ask(
            server,
            prompt,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_reasoning_tokens=5,
            max_tokens=400,
            ignore_eos=False,
            seed=seed,
        )
        assert finish == "tool_calls"
        # the marker that the model may begin with, five, and the marker that ends them
        assert counted <= (6 if prompt == "think" else 7)
        assert counted > 0 or prompt == "talk", "the prompt has opened it"
        assert message["content"] is None
        function = message["tool_calls"][0]["function"]
        assert function["name"] == "weather"
        arguments = json.loads(function["arguments"])
        assert set(arguments) == {"city", "days"}

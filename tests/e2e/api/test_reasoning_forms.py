"""Budgets and schemas behind reasoning whose markers are several tokens, on a real worker with random weights."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.models.tiny_model import tiny_llama, tiny_tokenizer
from helpers.serving.server import Server, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


@dataclass(frozen=True)
class Form:
    specials: tuple[str, ...]
    start: str  # of the answer, in the prompt
    opens: str  # what the prompt has behind it where it opens the reasoning
    ends: int  # tokens that are counted beside the thought: those of markers next to it


FORMS = {
    "think": Form((), "", "<think>", len("</think>")),
    "gemma": Form(("<|channel>", "<channel|>"), "", "<|channel>thought", 1),
    "harmony": Form(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>",
        1,
    ),
}


@pytest.fixture(scope="module", params=FORMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Server, Form]]:
    form = FORMS[request.param]
    folder = a_model(tmp_path_factory.mktemp(request.param), form)
    with serving(str(folder), "--reasoning-parser", request.param) as server:
        yield server, form


def a_model(folder: Path, form: Form) -> Path:
    tokenizer = tiny_tokenizer()
    first = len(tokenizer["model"]["vocab"])
    tiny_llama(folder, vocab_size=first + len(form.specials), max_position_embeddings=2048)
    model = dict(tokenizer["added_tokens"][0])
    for at, mark in enumerate(form.specials):
        tokenizer["added_tokens"].append(
            {**model, "id": first + at, "content": mark, "special": True}
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ messages[-1]['content'] }}"
        + form.start
        + "{% if messages[-1]['content'] == 'think' %}"
        + form.opens
        + "{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ask(server: Server, prompt: str, **more: Any) -> tuple[dict[str, Any], str, int, int]:
    """The message, why it ended, its tokens, and those of reasoning."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1,
        "max_tokens": 150,
        **more,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    choice, usage = reply.json["choices"][0], reply.json["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    return choice["message"], choice["finish_reason"], usage["completion_tokens"], counted


@pytest.mark.parametrize("most", [0, 1, 6])
def test_a_budget_is_kept_to_the_token_and_the_schema_holds_the_answer(
    served: tuple[Server, Form], most: int
) -> None:
    server, form = served
    for seed in range(4):
        message, finish, _, counted = ask(
            server, "think", response_format=FORMAT, max_reasoning_tokens=most, seed=seed
        )
        assert finish == "stop"
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert counted == most + form.ends
        assert most or not message.get("reasoning_content")


@pytest.mark.parametrize("most", [0, 4])
def test_an_answer_that_nothing_opens_answers_to_the_schema_as_well(
    served: tuple[Server, Form], most: int
) -> None:
    server, _ = served
    for seed in range(4):
        message, finish, _, _ = ask(
            server, "talk", response_format=FORMAT, max_reasoning_tokens=most, seed=seed
        )
        assert finish == "stop"
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_budget_works_without_a_grammar(served: tuple[Server, Form]) -> None:
    server, form = served
    for seed in range(3):
        _, finish, tokens, counted = ask(
            server,
            "think",
            max_reasoning_tokens=5,
            seed=seed,
            ignore_eos=True,
            max_tokens=60,
        )
        assert (finish, tokens) == ("length", 60)
        assert counted == 5 + form.ends


def test_without_a_budget_the_thought_goes_on_and_ends_no_answer(
    served: tuple[Server, Form],
) -> None:
    server, _ = served
    for seed in range(3):
        message, finish, tokens, _ = ask(server, "think", response_format=FORMAT, seed=seed)
        assert (finish, tokens) == ("length", 150) or json.loads(message["content"])

"""Answers that follow a grammar, over HTTP with the `openai` client: random weights make random text, but valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from helpers.serving.server import Server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
EXTRA: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"guided_regex": "[0-9]{3}-[a-z]{2,4}"}, r"[0-9]{3}-[a-z]{2,4}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "lark": ({"guided_grammar": 'start: "<" /[a-z]{1,9}/ ">"'}, "<[a-z]{1,9}>"),
    "gbnf": ({"guided_grammar": 'root ::= "<" [a-z]{1,9} ">"'}, "<[a-z]{1,9}>"),
}


def ask(server: Server, *, stream: bool = False, **options: Any) -> tuple[str, str | None]:
    """Text and finish reason."""
    create: Any = server.client.chat.completions.create
    answer = create(
        model=server.model,
        messages=[{"role": "user", "content": "Say something."}],
        stream=stream,
        **{"max_tokens": 300, "temperature": 1, **options},
    )
    if not stream:
        return answer.choices[0].message.content, answer.choices[0].finish_reason
    text, finish = "", None
    for chunk in answer:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_streamed_or_not(tiny: Server, seed: int) -> None:
    text, finish = ask(tiny, response_format=FORMAT, seed=seed)
    assert finish == "stop"
    check(text)
    assert ask(tiny, response_format=FORMAT, seed=seed, stream=True) == (text, finish)


def test_any_object_begins_as_one_and_only_length_cuts_it(tiny: Server) -> None:
    finishes: set[str | None] = set()
    for seed in range(6):
        text, finish = ask(tiny, response_format={"type": "json_object"}, seed=seed, max_tokens=120)
        finishes.add(finish)
        assert text.startswith("{")
        if finish == "stop":
            assert isinstance(json.loads(text), dict)
    assert finishes <= {"stop", "length"}


@pytest.mark.parametrize("name", EXTRA)
def test_what_vllm_calls_guided(tiny: Server, name: str) -> None:
    body, pattern = EXTRA[name]
    for seed in range(3):
        text, finish = ask(tiny, extra_body=body, seed=seed)
        assert finish == "stop"
        assert re.fullmatch(pattern, text), text


def test_a_schema_that_cannot_be_followed_is_named(tiny: Server) -> None:
    bad = {**SCHEMA, "properties": {"age": {"type": "integer", "not": {"const": 3}}}}
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tiny, response_format=broken)
    assert refused.value.param == "response_format.json_schema.schema.properties.age.not"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tiny, response_format=FORMAT, extra_body={"guided_regex": "a"})
    assert refused.value.param == "guided_regex"


def test_each_choice_follows(tiny: Server) -> None:
    create: Any = tiny.client.chat.completions.create
    answer = create(
        model=tiny.model,
        messages=[{"role": "user", "content": "Say something."}],
        n=4,
        seed=5,
        max_tokens=300,
        response_format=FORMAT,
    )
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        check(text)
    assert len(set(texts)) > 1

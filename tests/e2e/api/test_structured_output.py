"""Answers that follow a grammar, over HTTP with the `openai` client: random weights make random text, but valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from helpers.engine.toy_grammar import too_ambiguous
from helpers.serving.server import Server, eventually

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


def test_a_bound_that_is_met_in_mid_answer_fails_the_request_alone_and_is_not_tried_again(
    tiny: Server,
) -> None:
    question = [{"role": "user", "content": "Say something."}]
    other = {"model": tiny.model, "messages": question, "seed": 3, "max_tokens": 60}
    other |= {"ignore_eos": True, "temperature": 1}
    bounded = {"model": tiny.model, "messages": question, "max_tokens": 60, "seed": 1}
    bounded |= {"guided_grammar": too_ambiguous().source}
    alone = tiny.post("/v1/chat/completions", other).json["choices"][0]["message"]["content"]
    before = metric(tiny, "headrace_retries_total")
    with tiny.stream("/v1/chat/completions", other) as events:
        text = said(next(events))
        refused = tiny.post("/v1/chat/completions", bounded)
        text += "".join(said(event) for event in events if event != "[DONE]")
    assert text == alone
    assert (refused.status, refused.error["code"]) == (400, "grammar"), refused.json
    assert "no token can go on under the grammar" in refused.error["message"]
    with tiny.stream("/v1/chat/completions", bounded) as events:
        *chunks, error = [json.loads(event) for event in events]
    assert error["error"]["code"] == "grammar"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).startswith("xa")
    assert metric(tiny, "headrace_retries_total") == before


def said(event: str) -> str:
    choices = json.loads(event)["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def metric(server: Server, name: str) -> float:
    """The sum over its labels."""
    found = re.findall(
        rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", server.get("/metrics").body.decode(), re.MULTILINE
    )
    assert found, name
    return sum(map(float, found))


def test_what_grammars_cost_a_worker_is_in_the_metrics_of_the_router(tiny: Server) -> None:
    """A worker tells of it with a heartbeat."""
    names = ["compiled", "known", "masks", "compile_seconds", "mask_seconds"]

    def totals() -> list[float]:
        return [metric(tiny, f"headrace_worker_grammar_{name}_total") for name in names]

    def answer(text: str, seed: int) -> None:
        assert ask(tiny, extra_body={"guided_regex": f"[0-9]{{5}}{text}"}, seed=seed)[1] == "stop"

    compiled = totals()[0]
    answer("this tells that all before it was told", 1)
    eventually(
        lambda: totals()[0] > compiled, lambda: "the grammar that was compiled is never told"
    )
    before, checks = totals(), metric(tiny, "headrace_grammar_check_seconds_count")
    for seed in range(3):
        answer("the totals", seed)
    eventually(
        lambda: totals()[1] == before[1] + 2, lambda: "two of three are never told to be known"
    )
    compiled, known, masks, compile_s, mask_s = (
        after - earlier for after, earlier in zip(totals(), before, strict=True)
    )
    assert (compiled, known) == (1, 2)
    assert masks > 10
    assert compile_s > 0.0
    assert mask_s > 0.0
    assert metric(tiny, "headrace_grammar_check_seconds_count") == checks + 1

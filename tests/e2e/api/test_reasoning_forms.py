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
    ends: str  # the reasoning
    opens: str | None = None  # what the prompt has behind its start where it opens the reasoning
    at_once: str = ""  # what ends the reasoning where the answer begins


CHANNEL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FORMS = {
    "think": Form((), "", "</think>", "<think>"),
    "gemma": Form(("<|channel>", "<channel|>"), "", "<channel|>", "<|channel>thought"),
    "harmony": Form(
        CHANNEL,
        "<|end|><|start|>assistant",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        at_once="<|channel|>final<|message|>",
    ),
}


@dataclass(frozen=True)
class Served:
    server: Server
    form: Form
    names: dict[int, str]  # of tokens, which are their texts where these are ASCII


@pytest.fixture(scope="module", params=FORMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    form = FORMS[request.param]
    folder = a_model(tmp_path_factory.mktemp(request.param), form)
    vocab = tiny_tokenizer()["model"]["vocab"]
    names = {token: name for name, token in vocab.items()}
    names |= {len(vocab) + at: name for at, name in enumerate(form.specials)}
    with serving(str(folder), "--reasoning-parser", request.param) as server:
        yield Served(server, form, names)


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
        + (form.opens or "")
        + "{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Answer:
    content: str | None
    finish: str
    tokens: list[str]
    reasoned: int


def ask(served: Served, prompt: str, **more: Any) -> Answer:
    body = {
        "model": served.server.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1,
        "max_tokens": 600,
        "return_token_ids": True,
        **more,
    }
    reply = served.server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    choice, usage = reply.json["choices"][0], reply.json["usage"]
    tokens = [served.names[token] for token in choice["token_ids"]]
    assert len(tokens) == usage["completion_tokens"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    return Answer(choice["message"]["content"], choice["finish_reason"], tokens, counted)


@pytest.mark.parametrize("most", [0, 1, 6])
def test_a_budget_is_kept_to_the_token_and_the_schema_holds_the_answer(
    served: Served, most: int
) -> None:
    form = served.form
    for seed in range(4):
        prompt = "talk" if form.opens is None else "think"
        answer = ask(served, prompt, response_format=FORMAT, max_reasoning_tokens=most, seed=seed)
        marker = form.at_once if form.at_once and most == 0 else form.ends
        text = "".join(answer.tokens[most:])
        assert text.startswith(marker), answer
        assert answer.finish == "stop"
        assert answer.content is not None
        jsonschema.validate(json.loads(answer.content), SCHEMA)
        if form.opens is not None:
            assert answer.reasoned == most + tokens_of(answer.tokens[most:], marker)


def tokens_of(tokens: list[str], text: str) -> int:
    """How many of them write this text."""
    return next(at for at in range(1, len(tokens)) if "".join(tokens[:at]) == text)


@pytest.mark.parametrize("most", [0, 4])
def test_an_answer_that_nothing_opens_answers_to_the_schema_as_well(
    served: Served, most: int
) -> None:
    for seed in range(4):
        answer = ask(served, "talk", response_format=FORMAT, max_reasoning_tokens=most, seed=seed)
        assert answer.finish == "stop"
        assert answer.content is not None
        jsonschema.validate(json.loads(answer.content), SCHEMA)


def test_a_budget_works_without_a_grammar(served: Served) -> None:
    form = served.form
    for seed in range(3):
        prompt = "talk" if form.opens is None else "think"
        answer = ask(
            served, prompt, max_reasoning_tokens=5, seed=seed, ignore_eos=True, max_tokens=60
        )
        assert (answer.finish, len(answer.tokens)) == ("length", 60)
        assert "".join(answer.tokens[5:]).startswith(form.ends)


def test_without_a_budget_the_thought_goes_on_and_ends_no_answer(served: Served) -> None:
    prompt = "talk" if served.form.opens is None else "think"
    for seed in range(3):
        answer = ask(served, prompt, response_format=FORMAT, seed=seed)
        if answer.finish == "stop":  # random tokens may write the marker where it is one token
            text = "".join(answer.tokens)
            assert served.form.ends in text
            assert "<|im_end|>" not in text.partition(served.form.ends)[0]
            assert answer.content is not None
            jsonschema.validate(json.loads(answer.content), SCHEMA)
        else:
            assert answer.finish == "length"
            assert "<|im_end|>" not in answer.tokens

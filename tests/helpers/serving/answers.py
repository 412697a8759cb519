"""Requests of every kind of sampling, and what a server answers: the same from every worker, to the last byte."""

from __future__ import annotations

from typing import Any

from helpers.serving.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# By a name that says what is asked for; the seeds are part of it.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 5},
    "several": {"temperature": 1.1, "seed": 6, "n": 3},
    "top-p": {"temperature": 1, "seed": 7, "top_p": 0.8},
    "top-k": {"temperature": 1, "seed": 8, "top_k": 7},
    "min-p": {"temperature": 1.3, "seed": 9, "min_p": 0.2},
    "all cuts": {"temperature": 1, "seed": 10, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0.6, "seed": 11, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.7, "seed": 12, "logit_bias": {"9": 5, "17": -100, "40": 2.5}},
    "logprobs": {"temperature": 0.8, "seed": 13, "logprobs": 4},
    "echo": {"temperature": 0, "logprobs": 2, "echo": True},
    "min_tokens": {"temperature": 0, "min_tokens": 30},
    "bad words": {"temperature": 0, "bad_words": ["the", " of"]},
    "schema": {"temperature": 0.8, "seed": 14, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}},
}  # fmt: skip


def answers(server: Server, *, tokens: int = 40) -> dict[str, list[Any]]:
    """Of each of `ASKED`: texts, why they end, and log-probabilities rounded to what a table of them would show."""
    found: dict[str, list[Any]] = {}
    for name, asked in ASKED.items():
        body = {
            "model": server.model,
            "prompt": "Water flows down the hill and",
            "max_tokens": tokens,
            "ignore_eos": True,
            **asked,
        }
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, (name, reply.body)
        found[name] = [_plain(choice) for choice in reply.json["choices"]]
    return found


def _plain(choice: dict[str, Any]) -> Any:
    plain = [choice["text"], choice["finish_reason"]]
    if choice.get("logprobs"):
        logprobs = choice["logprobs"]["token_logprobs"]
        plain.append([None if one is None else round(one, 3) for one in logprobs])
    return plain

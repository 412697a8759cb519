"""Parameters of vLLM that workers serve, over HTTP with a real engine on random weights."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.serving.server import Server

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    reply = server.post(path, {"model": server.model, **body})
    assert reply.status == 200, reply.json
    return reply.json


def ids_of(server: Server, **body: Any) -> list[int]:
    reply = post(
        server, PLAIN, **{"prompt": "Once", "max_tokens": 24, "return_token_ids": True, **body}
    )
    return reply["choices"][0]["token_ids"]


def tokens_of(server: Server, text: str) -> list[int]:
    return post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]


def test_tokenize_has_the_tokens_of_a_chat_with_tools(tiny: Server) -> None:
    function = {"name": "now", "description": "The time", "parameters": {"type": "object"}}
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    asks = {"role": "user", "content": "When?"}
    calls = {"role": "assistant", "tool_calls": [call]}
    for messages in [[asks], [asks, calls, result]]:
        chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        used = post(tiny, CHAT, max_tokens=1, return_token_ids=True, **chat)
        assert post(tiny, "/tokenize", **chat)["tokens"] == used["prompt_token_ids"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_only_allowed_tokens_are_generated(tiny: Server, temperature: float) -> None:
    allowed = [40, 41, 42, 200]
    ids = ids_of(tiny, allowed_token_ids=allowed, temperature=temperature, seed=3)
    assert len(ids) == 24 and set(ids) <= set(allowed)


def test_bad_words_are_not_written_and_change_nothing_where_they_would_not_be(tiny: Server) -> None:
    free = ids_of(tiny, temperature=0)
    words = {token: post(tiny, "/detokenize", tokens=[token])["prompt"].lstrip() for token in free}
    token = next(
        token for token, word in words.items() if word and tokens_of(tiny, word) == [token]
    )
    bound = ids_of(tiny, temperature=0, bad_words=[words[token]])
    assert token not in bound
    assert bound[: free.index(token)] == free[: free.index(token)]
    assert ids_of(tiny, temperature=0, bad_words=["nothing like this is ever written"]) == free


def test_the_prompt_of_a_chat_is_scored_as_an_echo_would_score_it(tiny: Server) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    chat = post(
        tiny, CHAT, messages=messages, max_tokens=1, prompt_logprobs=2, return_token_ids=True
    )
    prompt = chat["prompt_token_ids"]
    echo = post(tiny, PLAIN, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    want = echo["choices"][0]["logprobs"]["token_logprobs"]
    scores = chat["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(prompt)
    got = [
        entry[str(token)]["logprob"] for entry, token in zip(scores[1:], prompt[1:], strict=True)
    ]
    assert got == want[1:]
    for entry in scores[1:]:
        ranks = {scored["rank"]: scored["logprob"] for scored in entry.values()}
        assert ranks[1] >= ranks[2]
    plain = post(tiny, PLAIN, prompt=prompt, max_tokens=1, prompt_logprobs=2)
    assert plain["choices"][0]["prompt_logprobs"] == scores

"""Calls of tools through `/v1/responses` and `/v1/messages`, put together by the clients that people use.

The mock worker writes what a model would; every cut of its text into two steps has to give the same calls.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import anthropic
import pytest

from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server
from helpers.slices import places


def call(city: str) -> str:
    arguments = {"name": "get_weather", "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


BASEL, BERN = ("call", "get_weather", {"city": "Basel"}), ("call", "get_weather", {"city": "Bern"})
CASES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "One city": (call("Basel"), [BASEL]),
    "Two cities": (f"{call('Basel')}\n{call('Bern')}", [BASEL, BERN]),
    "Say it first": (f"Let me look.\n{call('Basel')}", [("text", "Let me look."), BASEL]),
    "Think of it": (
        f"<think>\nBasel, then.\n</think>\n\n{call('Basel')}",
        [("reasoning", "Basel, then."), BASEL],
    ),
    "Do everything": (
        f"<think>\nBoth.\n</think>\n\nBoth of them:\n{call('Basel')}\n{call('Bern')}",
        [("reasoning", "Both."), ("text", "Both of them:"), BASEL, BERN],
    ),
}
CUTS = 7  # unless all are tried
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
THEIR_TOOL: Any = {"name": "get_weather", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    answers: list[dict[str, Any]] = [
        {"when": "Cut it", "text": call("Basel"), "pieces": "characters"},
        *(
            {"when": when, "text": text, "tokens_per_step": "every-cut"}
            for when, (text, _) in CASES.items()
        ),
    ]
    flags = ("--tool-parser=hermes", "--reasoning-parser=think")
    with scripted(tmp_path_factory.mktemp("calls"), answers, *flags) as server:
        yield server


def items_of(response: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append(("call", item.name, json.loads(item.arguments)))
        else:
            kind = {"message": "text", "reasoning": "reasoning"}[item.type]
            found.append((kind, "".join(part.text for part in item.content).strip()))
    return found


def blocks_of(message: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "tool_use":
            found.append(("call", block.name, block.input))
        elif block.type == "thinking":
            found.append(("reasoning", block.thinking.strip()))
        else:
            found.append(("text", block.text.strip()))
    return found


def in_order(events: list[Any]) -> None:
    """Items follow each other, and what is said of one stands between its beginning and its end."""
    open_item: str | None = None
    index = -1
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            assert event.output_index == index + 1
            open_item, index = event.item.id, event.output_index
        elif event.type == "response.output_item.done":
            assert (event.item.id, event.output_index) == (open_item, index)
            open_item = None
        else:
            assert (event.item_id, event.output_index) == (open_item, index)
    assert open_item is None
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize("when", CASES)
def test_responses_call_whole_and_streamed(
    server: Server, pytestconfig: pytest.Config, when: str
) -> None:
    wishes: Any = {"model": MODEL, "input": when, "tools": [TOOL]}
    responses: Any = server.client.responses
    cuts = responses.create(**wishes).usage.output_tokens - 1
    for seed in places(pytestconfig, cuts, CUTS):
        more = {"seed": seed}
        whole = responses.create(**wishes, extra_body=more)
        assert items_of(whole) == CASES[when][1], seed
        assert whole.status == "completed"
        with responses.stream(**wishes, extra_body=more) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert items_of(final) == CASES[when][1], seed
        in_order(events)
        assert events[-1].type == "response.completed"
        calls = [item for item in whole.output if item.type == "function_call"]
        assert len({item.call_id for item in calls}) == len(calls)


@pytest.mark.parametrize("when", CASES)
def test_messages_call_whole_and_streamed(
    server: Server, pytestconfig: pytest.Config, when: str
) -> None:
    wishes: Any = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": when}],
        "tools": [THEIR_TOOL],
    }
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        cuts = client.messages.create(**wishes).usage.output_tokens - 1
        for seed in places(pytestconfig, cuts, CUTS):
            more = {"seed": seed}
            whole = client.messages.create(**wishes, extra_body=more)
            assert blocks_of(whole) == CASES[when][1], seed
            assert whole.stop_reason == "tool_use"
            with client.messages.stream(**wishes, extra_body=more) as stream:
                last = stream.get_final_message()
            assert blocks_of(last) == CASES[when][1], seed
            assert last.stop_reason == "tool_use"
            assert last.usage.output_tokens == whole.usage.output_tokens


def test_a_call_that_is_cut_says_so(server: Server) -> None:
    responses: Any = server.client.responses
    whole_call = json.dumps({"city": "Basel"})
    wishes: Any = {"model": MODEL, "input": "Cut it", "tools": [TOOL], "max_output_tokens": 55}
    whole = responses.create(**wishes)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [item] = whole.output
    assert (item.type, item.status) == ("function_call", "incomplete")
    assert whole_call.startswith(item.arguments.strip())
    assert len(item.arguments) < len(whole_call)
    events = list(responses.create(**wishes, stream=True))
    in_order(events)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].arguments == item.arguments

    theirs: Any = {
        "model": MODEL,
        "max_tokens": 55,
        "messages": [{"role": "user", "content": "Cut it"}],
        "tools": [THEIR_TOOL],
    }
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        message = client.messages.create(**theirs)
        assert message.stop_reason == "max_tokens"
        assert [block.type for block in message.content] == ["tool_use"]
        with client.messages.stream(**theirs) as stream:
            assert stream.get_final_message().stop_reason == "max_tokens"


def test_results_of_calls_are_counted_and_read(server: Server) -> None:
    """The second turn of an agent: what it called, and what came of it."""
    responses: Any = server.client.responses
    first = responses.create(model=MODEL, input="One city", tools=[TOOL], extra_body={"seed": 1})
    [made] = first.output
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "21 degrees"}
    second = responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tools=[TOOL]
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        asks: Any = [{"role": "user", "content": "One city"}]
        bare = client.messages.count_tokens(model=MODEL, messages=asks)
        told = client.messages.count_tokens(
            model=MODEL, messages=asks, tools=[THEIR_TOOL], system="Be brief."
        )
        assert told.input_tokens > bare.input_tokens
        chosen: Any = {"type": "tool", "name": "get_weather"}
        message = client.messages.create(
            model=MODEL,
            max_tokens=500,
            messages=asks,
            tools=[THEIR_TOOL],
            tool_choice=chosen,
            extra_headers={"anthropic-beta": "anything-2025-01-01"},
        )
        assert blocks_of(message) == [BASEL]


def test_models_are_listed_for_both_clients(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        models = list(client.models.list())
        assert [(model.id, model.type) for model in models] == [(MODEL, "model")]
        assert client.models.retrieve(MODEL).created_at.year > 2000


def test_errors_name_items_and_wrong_metadata(server: Server) -> None:
    for body, param in [
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
    ]:
        reply = server.post("/v1/responses", {"model": MODEL} | body)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert f"`{param}`" in reply.error["message"]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "metadata": {"a": []}}
    assert server.post("/v1/chat/completions", chat).error["param"] == "metadata.a"


def test_log_probabilities_are_read_by_the_client(server: Server) -> None:
    responses: Any = server.client.responses
    wishes: Any = {"model": MODEL, "input": "Say it first", "tools": [TOOL], "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    whole = responses.create(**wishes, include=include, extra_body={"seed": 3})
    assert whole.top_logprobs == 2
    scored = whole.output[0].content[0].logprobs
    assert "".join(one.token for one in scored).strip() == "Let me look."
    events = list(responses.create(**wishes, include=include, stream=True, extra_body={"seed": 3}))
    told = [
        one.token
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert told == [one.token for one in scored]

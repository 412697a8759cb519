"""`/v1/responses` through the real stack, with the `openai` client that people use."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from helpers.serving.server import Server

PARIS = "The capital of France is Paris."
QUESTION = "What is the capital of France?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def responses(server: Server) -> Any:
    return server.client.responses


def test_a_response_is_whole_streamed_and_stored(real: Server) -> None:
    wishes: dict[str, Any] = {"model": real.model, "input": QUESTION, "temperature": 0}
    whole = responses(real).create(**wishes, max_output_tokens=24)
    assert (whole.output_text, whole.status) == (PARIS, "completed")
    assert responses(real).retrieve(whole.id) == whole
    items = list(responses(real).input_items.list(whole.id))
    assert [item.content[0].text for item in items] == [QUESTION]

    events = list(responses(real).create(**wishes, max_output_tokens=24, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == PARIS
    assert len(deltas) > 3
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == PARIS
    responses(real).delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        responses(real).retrieve(whole.id)


def test_the_clients_own_stream_puts_a_response_together(real: Server) -> None:
    with real.client.responses.stream(
        model=real.model, input=QUESTION, temperature=0, max_output_tokens=24
    ) as stream:
        for _event in stream:
            pass
        assert stream.get_final_response().output_text == PARIS


def test_a_response_goes_on_where_another_one_ended(real: Server) -> None:
    first = responses(real).create(model=real.model, input=QUESTION, temperature=0)
    wishes: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}
    again = {"role": "user", "content": "Say that again."}
    second = responses(real).create(
        model=real.model, input=[again], previous_response_id=first.id, **wishes
    )
    messages: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        again,
    ]
    chat = real.client.chat.completions.create(
        model=real.model, messages=messages, temperature=0, max_tokens=24
    )
    assert second.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_a_response_follows_a_schema(tiny: Server) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    response = responses(tiny).create(
        model=tiny.model, input="x", text=text, extra_body={"seed": 3}
    )
    assert set(json.loads(response.output_text)) == {"name", "age"}


def test_what_a_response_cannot_have_is_named(real: Server) -> None:
    tools: Any = [{"type": "web_search"}]
    for wish in ({"background": True}, {"tools": tools}, {"previous_response_id": "resp_x"}):
        with pytest.raises(openai.BadRequestError) as refused:
            responses(real).create(model=real.model, input="x", **wish)
        assert str(refused.value.param).split("[")[0] in wish

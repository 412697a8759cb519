"""`output_format` of a class, which the client sends as `output_config.format`, whole and streamed; a call that has to be; an
agent whose turns are streamed and all have to be calls, up to the one that reports."""

from typing import Literal

import anthropic
from pydantic import BaseModel
from rows import ABOUT, MODEL, URL, WHEEL, feature

client = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0, timeout=120)
WISHES = {
    "model": MODEL,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": ABOUT}],
    "extra_body": {"temperature": 0},
}


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("structured")
def structured():
    parsed = client.messages.parse(**WISHES, output_format=Wheel)
    assert isinstance(parsed.parsed_output, Wheel), parsed
    with client.messages.stream(**WISHES, output_format=Wheel) as events:
        streamed = events.get_final_message()
    assert streamed.parsed_output == parsed.parsed_output, streamed
    config = {"format": {"type": "json_schema", "schema": WHEEL}}
    written = client.messages.create(**WISHES, output_config=config)
    assert Wheel.model_validate_json(written.content[0].text) == parsed.parsed_output, written
    tool = {"name": "report", "description": "Reports a wheel.", "input_schema": WHEEL}
    choice = {"type": "tool", "name": "report"}
    called = client.messages.create(**WISHES, tools=[tool], tool_choice=choice)
    Wheel.model_validate(called.content[0].input)


CITY = {"type": "string", "maxLength": 30}
DEGREES = {"type": "integer", "minimum": -50, "maximum": 50}


def function(name, about, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": about, "input_schema": schema}


@feature("agent")
def agent():
    tools = [
        function("get_weather", "The weather of a city now.", city=CITY),
        function("report", "The final answer to the user.", city=CITY, degrees=DEGREES),
    ]
    messages = [{"role": "user", "content": "Get the weather in Paris, then report it."}]
    called = []
    while "report" not in called:
        assert len(called) < 6, called
        with client.messages.stream(
            **{**WISHES, "max_tokens": 120, "messages": messages},
            tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
        assert answer.stop_reason == "tool_use", answer
        [call] = [block for block in answer.content if block.type == "tool_use"]
        called.append(call.name)
        text = f"It is 21 degrees in {call.input['city']}. Report it with the function report."
        result = {"type": "tool_result", "tool_use_id": call.id, "content": text}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    assert called[0] == "get_weather", called
    assert call.input["degrees"] == 21, call

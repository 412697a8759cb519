"""`output_format` of a class, which the client sends as `output_config.format`, whole and streamed; a call that has to be."""

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

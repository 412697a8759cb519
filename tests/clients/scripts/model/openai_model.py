"""What the client can hold a model to: an answer of a class, streamed too, arguments of a strict function, a response."""

from typing import Literal

import openai
from pydantic import BaseModel
from rows import ABOUT, MODEL, URL, feature

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=120)
COMMON = {"model": MODEL, "temperature": 0}
MESSAGES = [{"role": "user", "content": ABOUT}]


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("structured")
def structured():
    wishes = {**COMMON, "messages": MESSAGES, "max_tokens": 100}
    parsed = client.chat.completions.parse(**wishes, response_format=Wheel)
    assert isinstance(parsed.choices[0].message.parsed, Wheel), parsed
    with client.chat.completions.stream(**wishes, response_format=Wheel) as events:
        streamed = events.get_final_completion()
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed, streamed
    called = client.chat.completions.parse(
        **wishes,
        tools=[openai.pydantic_function_tool(Wheel)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Wheel), called
    response = client.responses.parse(
        **COMMON, input=ABOUT, text_format=Wheel, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Wheel), response

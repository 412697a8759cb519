"""`json_schema` of a class and of a schema, and a call that has to be."""

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
import litellm
from pydantic import BaseModel
from rows import ABOUT, MODEL, URL, WHEEL, feature

WISHES = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "unused",
    "timeout": 120,
    "messages": [{"role": "user", "content": ABOUT}],
    "temperature": 0,
    "max_tokens": 100,
}


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("structured")
def structured():
    schema = {"type": "json_schema", "json_schema": {"name": "wheel", "schema": WHEEL}}
    for wish in (Wheel, schema):
        answer = litellm.completion(**WISHES, response_format=wish)
        Wheel.model_validate_json(answer.choices[0].message.content)
    function = {"name": "report", "description": "Reports a wheel.", "parameters": WHEEL}
    tools = [{"type": "function", "function": function}]
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**WISHES, **forced)
    Wheel.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)

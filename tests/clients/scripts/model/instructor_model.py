"""A class by each mode of the client for servers of OpenAI's API."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from rows import ABOUT, MODEL, URL, feature

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=120)


class Wheel(BaseModel):
    """A wheel."""

    model_config = ConfigDict(extra="forbid")  # else a model may add fields without end
    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("structured")
def structured():
    modes = instructor.Mode
    for mode in (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON_SCHEMA):
        answer = instructor.from_openai(plain, mode=mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ABOUT}],
            response_model=Wheel,
            max_retries=0,
            temperature=0,
            max_tokens=100,
        )
        assert isinstance(answer, Wheel), (mode, answer)

"""A call that has to come, its result, and an answer in words; a class by each method of the client."""

from typing import Annotated, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from rows import ABOUT, MODEL, URL, feature

model = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key="unused",
    max_retries=0,
    timeout=120,
    temperature=0,
    max_tokens=100,
)


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@tool
def get_weather(city: Annotated[str, Field(max_length=30)]) -> str:
    """The weather of a city now."""
    return f"It is 21 degrees and sunny in {city}."


@feature("agent")
def agent():
    messages = [HumanMessage("What is the weather in Paris?")]
    forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    messages.append(forced.invoke(messages))
    assert messages[-1].tool_calls[0]["args"] == {"city": "Paris"}, messages[-1]
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    answer = model.invoke(messages)
    assert "21 degrees" in answer.content, answer


@feature("structured")
def structured():
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Wheel, method=method).invoke(ABOUT)
        assert isinstance(answer, Wheel), (method, answer)

"""An agent that calls a tool, gets its result and reports; its final answer is a class."""

import asyncio
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from rows import ABOUT, MODEL, URL, feature

set_tracing_disabled(True)  # it would send what ran to OpenAI
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=120)
CHAT, RESPONSES = (
    kind(MODEL, client) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
)
EVENTS = asyncio.new_event_loop()  # one, as the client keeps its connections
called = []


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@function_tool
def get_weather(city: Annotated[str, Field(max_length=30)]) -> str:
    """The weather of a city now."""
    called.append(city)
    return f"It is 21 degrees in {city}. Report it with the function report."


@function_tool
def report(
    city: Annotated[str, Field(max_length=30)], degrees: Annotated[int, Field(ge=-50, le=50)]
) -> str:
    """The final answer to the user."""
    return f"{degrees} degrees"


async def run(agent, text):
    return (await Runner.run(agent, text, max_turns=8)).final_output


async def structured_by_each():
    settings = ModelSettings(temperature=0, max_tokens=100)
    for model in (CHAT, RESPONSES):
        held = Agent("held", model=model, output_type=Wheel, model_settings=settings)
        answer = await run(held, ABOUT)
        assert isinstance(answer, Wheel), answer


async def loop():
    settings = ModelSettings(
        temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False
    )
    weather = Agent(
        "weather",
        model=CHAT,
        tools=[get_weather, report],
        model_settings=settings,
        tool_use_behavior=StopAtTools(stop_at_tool_names=["report"]),
        reset_tool_choice=False,
    )
    answer = await run(weather, "Get the weather in Paris, then report it.")
    assert called, "the tool was not called"
    assert answer == "21 degrees", answer


@feature("structured")
def structured():
    EVENTS.run_until_complete(structured_by_each())


@feature("agent")
def agent():
    EVENTS.run_until_complete(loop())

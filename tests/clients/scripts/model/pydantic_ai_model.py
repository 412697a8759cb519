"""An agent whose every answer has to be a call: a tool, its result, and the final answer; a class as schema and as tool."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import ABOUT, MODEL, URL, feature

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="unused"))
called = []


class Report(BaseModel):
    """The final answer to the user."""

    city: Annotated[str, Field(max_length=30)]
    degrees: Annotated[int, Field(ge=-50, le=50)]


class Wheel(BaseModel):
    """A wheel."""

    model_config = ConfigDict(extra="forbid")  # else a model may add fields without end
    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("agent")
def agent():
    # no text may be the output, so the client sends tool_choice: required in each turn
    weather = Agent(
        model,
        output_type=ToolOutput(Report, name="report"),
        model_settings={"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False},
    )

    @weather.tool_plain
    def get_weather(city: Annotated[str, Field(max_length=30)]) -> str:
        """The weather of a city now."""
        called.append(city)
        return f"It is 21 degrees in {city}. Report it with the function report."

    run = weather.run_sync(
        "Get the weather in Paris, then report it.", usage_limits=UsageLimits(request_limit=8)
    )
    assert called, "the tool was not called"
    assert run.output.degrees == 21, run.output


@feature("structured")
def structured():
    for output in (NativeOutput(Wheel), ToolOutput(Wheel)):
        held = Agent(
            model, output_type=output, model_settings={"temperature": 0, "max_tokens": 100}
        )
        answer = held.run_sync(ABOUT, usage_limits=UsageLimits(request_limit=1)).output
        assert isinstance(answer, Wheel), (output, answer)

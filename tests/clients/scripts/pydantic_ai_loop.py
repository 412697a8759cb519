"""An agent whose every answer has to be a call: a tool, its result, and the final answer, by a real model."""

from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import MODEL, URL, feature

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="unused"))
called = []


class Report(BaseModel):
    """The final answer to the user."""

    city: Annotated[str, Field(max_length=30)]
    degrees: Annotated[int, Field(ge=-50, le=50)]


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

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import HELLO, MODEL, URL, feature

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="unused")
model = OpenAIChatModel(MODEL, provider=provider)


class Wheel(BaseModel):
    name: str
    height: int


def with_weather():
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        return "It is 21 degrees"

    return agent


@feature("chat")
def chat():
    assert Agent(model).run_sync("Hi").output == HELLO


@feature("stream")
def stream():
    import asyncio

    async def run():
        async with Agent(model).run_stream("Hi") as answer:
            return await answer.get_output()

    assert asyncio.run(run()) == HELLO


@feature("tools")
def tools():
    assert "21 degrees" in with_weather().run_sync("What is the weather in Basel?").output


@feature("structured")
def structured():
    answer = Agent(model, output_type=NativeOutput(Wheel)).run_sync("Describe the wheel")
    assert answer.output == Wheel(name="wheel", height=7), answer


@feature("responses")
def responses():
    answer = Agent(OpenAIResponsesModel(MODEL, provider=provider)).run_sync("Hi")
    assert answer.output == HELLO


@feature("errors")
def errors():
    try:
        Agent(OpenAIChatModel("other", provider=provider)).run_sync("Hi")
    except ModelHTTPError as error:
        assert error.status_code == 404, error
        return
    raise AssertionError("another model passed")

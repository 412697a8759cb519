import asyncio

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import HELLO, MODEL, URL, feature

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="unused")
model = OpenAIChatModel(MODEL, provider=provider)


def with_weather():
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        return "It is 21 degrees"

    return agent


@feature("chat")
def chat():
    assert Agent(model).run_sync("Hi").output == HELLO


async def streamed(agent, text):
    async with agent.run_stream(text) as answer:
        return await answer.get_output(), answer.all_messages()


@feature("stream")
def stream():
    assert asyncio.run(streamed(Agent(model), "Hi"))[0] == HELLO


@feature("tools")
def tools():
    assert "21 degrees" in with_weather().run_sync("What is the weather in Basel?").output


@feature("tools stream")
def tools_stream():
    output, messages = asyncio.run(streamed(with_weather(), "What is the weather in Basel?"))
    parts = [part for message in messages for part in message.parts]
    [call] = [part for part in parts if part.part_kind == "tool-call"]
    assert call.args_as_dict() == {"city": "Basel"}, messages
    assert "21 degrees" in output, output


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

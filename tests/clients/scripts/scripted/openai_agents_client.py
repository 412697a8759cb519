import asyncio

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from rows import HELLO, MODEL, URL, feature

set_tracing_disabled(True)  # it would send what ran to OpenAI
ANSWER = "It is 21 degrees in Basel."


def agent(kind=OpenAIChatCompletionsModel, model=MODEL, tools=()):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=60)
    return Agent("helper", model=kind(model, client), tools=list(tools))


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Basel"
    return "It is 21 degrees"


async def text_of_stream(of, text):
    streamed = Runner.run_streamed(of, text)
    raw = [
        event.data async for event in streamed.stream_events() if event.type == "raw_response_event"
    ]
    parts = [data.delta for data in raw if data.type == "response.output_text.delta"]
    return "".join(parts), streamed.final_output


@feature("chat")
def chat():
    assert Runner.run_sync(agent(), "Hi").final_output == HELLO


@feature("stream")
def stream():
    assert asyncio.run(text_of_stream(agent(), "Hi")) == (HELLO, HELLO)


@feature("tools")
def tools():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        run = Runner.run_sync(agent(kind, tools=[get_weather]), "What is the weather in Basel?")
        assert run.final_output == ANSWER, (kind, run)


@feature("tools stream")
def tools_stream():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asked = agent(kind, tools=[get_weather])
        answer = asyncio.run(text_of_stream(asked, "What is the weather in Basel?"))
        assert answer == (ANSWER, ANSWER), (kind, answer)


@feature("responses")
def responses():
    assert Runner.run_sync(agent(OpenAIResponsesModel), "Hi").final_output == HELLO


@feature("errors")
def errors():
    try:
        Runner.run_sync(agent(model="other"), "Hi")
    except openai.NotFoundError:
        return
    raise AssertionError("another model passed")

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
import litellm
from rows import HELLO, MODEL, URL, WEATHER, feature

COMMON = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused", "timeout": 60}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "d", "parameters": WEATHER},
    }
]


def user(text):
    return [{"role": "user", "content": text}]


@feature("chat")
def chat():
    answer = litellm.completion(messages=user("Hi"), **COMMON)
    assert answer.choices[0].message.content == HELLO, answer


@feature("stream")
def stream():
    parts = litellm.completion(messages=user("Hi"), stream=True, **COMMON)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO


@feature("tools")
def tools():
    answer = litellm.completion(
        messages=user("What is the weather in Basel?"), tools=TOOLS, **COMMON
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather", answer


@feature("tools stream")
def tools_stream():
    messages = user("What is the weather in Basel?")
    parts = list(litellm.completion(messages=messages, tools=TOOLS, stream=True, **COMMON))
    answer = litellm.stream_chunk_builder(parts, messages=messages).choices[0]
    [call] = answer.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Basel"}, answer
    assert answer.finish_reason == "tool_calls", answer


@feature("embeddings")
def embeddings():
    answer = litellm.embedding(input=["a wheel", "a river"], encoding_format="float", **COMMON)
    assert [len(item["embedding"]) for item in answer.data] == [64, 64], answer


@feature("errors")
def errors():
    try:
        litellm.completion(messages=user("Hi"), **{**COMMON, "model": "openai/other"})
    except litellm.NotFoundError:
        return
    raise AssertionError("another model passed")

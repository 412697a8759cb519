import openai
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from rows import HELLO, MODEL, URL, feature

COMMON = {"api_base": f"{URL}/v1", "api_key": "unused", "max_retries": 0, "timeout": 60}
COMMON |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
model = OpenAILike(model=MODEL, **COMMON)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is 21 degrees in {city}"


@feature("chat")
def chat():
    assert model.chat([ChatMessage(role="user", content="Hi")]).message.content == HELLO


@feature("stream")
def stream():
    parts = model.stream_chat([ChatMessage(role="user", content="Hi")])
    assert "".join(part.delta for part in parts) == HELLO


@feature("tools")
def tools():
    weather = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([weather], user_msg="What is the weather in Basel?")
    calls = model.get_tool_calls_from_response(answer)
    assert calls[0].tool_kwargs == {"city": "Basel"}, answer


@feature("tools stream")
def tools_stream():
    weather = FunctionTool.from_defaults(get_weather)
    *_, last = model.stream_chat_with_tools([weather], user_msg="What is the weather in Basel?")
    calls = model.get_tool_calls_from_response(last)
    assert [call.tool_kwargs for call in calls] == [{"city": "Basel"}], last


@feature("errors")
def errors():
    try:
        OpenAILike(model="other", **COMMON).chat([ChatMessage(role="user", content="Hi")])
    except openai.NotFoundError:
        return
    raise AssertionError("another model passed")

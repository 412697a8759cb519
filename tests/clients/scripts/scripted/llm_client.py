from llm_command import llm
from rows import HELLO, feature


@feature("chat")
def chat():
    assert HELLO in llm("Hi", "--no-stream")


@feature("stream")
def stream():
    assert HELLO in llm("Hi")


@feature("tools")
def tools():
    functions = "def get_weather(city: str) -> str:\n    return 'It is 21 degrees'\n"
    answer = llm("What is the weather in Basel?", "--functions", functions, "--no-stream")
    assert "21 degrees" in answer, answer

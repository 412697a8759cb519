import openai
from rows import HELLO, MODEL, URL, WEATHER, feature

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=60)


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
    answer = client.chat.completions.create(model=MODEL, messages=user("Hi"))
    assert answer.choices[0].message.content == HELLO, answer
    assert answer.usage.completion_tokens > 0


@feature("stream")
def stream():
    text, usage = "", None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=user("Hi"), stream=True, stream_options=options
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == HELLO and usage.completion_tokens > 0


@feature("tools")
def tools():
    answer = client.chat.completions.create(
        model=MODEL, messages=user("What is the weather in Basel?"), tools=TOOLS
    )
    choice = answer.choices[0]
    call = choice.message.tool_calls[0].function
    assert (call.name, choice.finish_reason) == ("get_weather", "tool_calls"), answer
    history = [
        *user("What is the weather in Basel?"),
        choice.message.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": choice.message.tool_calls[0].id,
            "content": "It is 21 degrees",
        },
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert "21 degrees" in answer.choices[0].message.content, answer


@feature("tools stream")
def tools_stream():
    with client.chat.completions.stream(
        model=MODEL, messages=user("What is the weather in Basel?"), tools=TOOLS
    ) as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather", message
    assert '"Basel"' in message.tool_calls[0].function.arguments, message


@feature("reasoning")
def reasoning():
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Think first"), reasoning_effort="low"
    )
    message = answer.choices[0].message
    assert message.content.strip() == "It is 42.", message
    assert "Seven" in message.reasoning_content, message


@feature("responses")
def responses():
    answer = client.responses.create(model=MODEL, input="Hi")
    assert answer.output_text == HELLO, answer
    events = client.responses.create(model=MODEL, input="Hi", stream=True)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == HELLO, text


@feature("embeddings")
def embeddings():
    answer = client.embeddings.create(model=MODEL, input=["a wheel", "a river"], dimensions=8)
    floats = client.embeddings.create(
        model=MODEL, input=["a wheel", "a river"], dimensions=8, encoding_format="float"
    )
    assert [item.index for item in answer.data] == [0, 1], answer
    for one, two in zip(answer.data, floats.data, strict=True):
        # numbers are written as briefly as float32 allows
        assert all(abs(a - b) < 1e-6 for a, b in zip(one.embedding, two.embedding, strict=True))
    assert abs(sum(x * x for x in answer.data[0].embedding) - 1) < 1e-5
    assert answer.usage.prompt_tokens > 0


@feature("errors")
def errors():
    for error, call in (
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"model": MODEL, "temperature": 9}),
    ):
        try:
            client.chat.completions.create(messages=user("Hi"), **call)
        except error as found:
            assert found.body["message"], found
        else:
            raise AssertionError(f"{call} passed")

import anthropic
from rows import HELLO, MODEL, URL, WEATHER, feature

client = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0, timeout=60)
TOOLS = [{"name": "get_weather", "description": "d", "input_schema": WEATHER}]


def ask(text, **options):
    options = {"model": MODEL, "max_tokens": 200, **options}
    return {"messages": [{"role": "user", "content": text}], **options}


@feature("messages")
def messages():
    answer = client.messages.create(**ask("Hi"))
    assert answer.content[0].text == HELLO and answer.stop_reason == "end_turn", answer
    assert (
        client.messages.count_tokens(model=MODEL, messages=ask("Hi")["messages"]).input_tokens > 0
    )


@feature("stream")
def stream():
    with client.messages.stream(**ask("Hi")) as events:
        assert "".join(events.text_stream) == HELLO


@feature("tools")
def tools():
    answer = client.messages.create(**ask("What is the weather in Basel?", tools=TOOLS))
    call = next(block for block in answer.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Basel"}), answer
    assert answer.stop_reason == "tool_use"


@feature("tools stream")
def tools_stream():
    with client.messages.stream(**ask("What is the weather in Basel?", tools=TOOLS)) as events:
        answer = events.get_final_message()
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.input == {"city": "Basel"}, answer


@feature("reasoning")
def reasoning():
    answer = client.messages.create(
        **ask("Think first", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    )
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"], answer


@feature("errors")
def errors():
    try:
        client.messages.create(**ask("Hi", model="other"))
    except anthropic.NotFoundError as error:
        assert error.body["type"] == "error", error.body
    else:
        raise AssertionError("another model passed")

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from rows import HELLO, MODEL, URL, feature

COMMON = {"base_url": f"{URL}/v1", "api_key": "unused", "max_retries": 0, "timeout": 60}
model = ChatOpenAI(model=MODEL, **COMMON)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "It is 21 degrees"


@feature("chat")
def chat():
    assert model.invoke("Hi").content == HELLO


@feature("stream")
def stream():
    assert "".join(part.content for part in model.stream("Hi")) == HELLO


@feature("tools")
def tools():
    answer = model.bind_tools([get_weather]).invoke("What is the weather in Basel?")
    assert answer.tool_calls[0]["args"] == {"city": "Basel"}, answer


@feature("tools stream")
def tools_stream():
    whole = None
    for part in model.bind_tools([get_weather]).stream("What is the weather in Basel?"):
        whole = part if whole is None else whole + part
    assert whole.tool_calls[0]["args"] == {"city": "Basel"}, whole


@feature("responses")
def responses():
    answer = ChatOpenAI(model=MODEL, use_responses_api=True, **COMMON).invoke("Hi")
    assert answer.text == HELLO, answer


@feature("embeddings")
def embeddings():
    model = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **COMMON)
    found = model.embed_documents(["a wheel", "a river"])
    assert [len(vector) for vector in found] == [64, 64], found
    assert model.embed_query("a wheel") == found[0]


@feature("errors")
def errors():
    try:
        ChatOpenAI(model="other", **COMMON).invoke("Hi")
    except openai.NotFoundError:
        return
    raise AssertionError("another model passed")

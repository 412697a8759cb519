"""The helpers of the `openai` client against scripted answers: `parse`, its stream, raw answers, errors by type."""

from __future__ import annotations

from collections.abc import Generator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from clients.answers import ANSWERS
from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server

HELLO = str(ANSWERS[-1]["text"])


class Wheel(BaseModel):
    name: str
    height: int


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    with scripted(tmp_path_factory.mktemp("scripted"), ANSWERS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client


def test_parse_makes_an_object_of_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user("Describe the wheel"), response_format=Wheel
    )
    assert answer.choices[0].message.parsed == Wheel(name="wheel", height=7)
    assert answer.choices[0].finish_reason == "stop"


def test_the_stream_helper_puts_the_same_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user("Describe the wheel"), response_format=Wheel
    ) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        whole = events.get_final_completion()
    assert whole.choices[0].message.parsed == Wheel(name="wheel", height=7)
    assert "".join(deltas) == whole.choices[0].message.content
    assert len(deltas) > 3, "it came in pieces"


def test_an_answer_that_is_cut_is_no_object(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=user("Describe the wheel"), response_format=Wheel, max_tokens=5
        )


def test_text_streamed_and_whole_is_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=user("Hi"))
    assert whole.choices[0].message.content == HELLO
    assert whole.usage is not None
    parts = client.chat.completions.create(model=MODEL, messages=user("Hi"), stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO
    plain = client.completions.create(model=MODEL, prompt="Hi", max_tokens=100)
    assert plain.choices[0].text == HELLO


def test_a_raw_answer_has_our_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=user("Hi"))
    assert raw.headers["x-headrace-worker"] == "w0"
    assert raw.parse().choices[0].message.content == HELLO


def test_errors_have_the_types_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=user("Hi"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=user("Hi"), temperature=9)
    assert wrong.value.param == "temperature"

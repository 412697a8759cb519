"""`/v1/messages` through the real stack, with the `anthropic` client that people use."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import pytest

from helpers.serving.server import Server

PARIS = "The capital of France is Paris."
QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0}  # that the client itself has no argument for any more


@pytest.fixture
def claude(real: Server) -> Generator[Any]:
    with anthropic.Anthropic(base_url=real.url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_message_is_whole_and_streamed(real: Server, claude: Any) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    wishes: dict[str, Any] = {"model": real.model, "max_tokens": 24, "extra_body": GREEDY}
    whole = claude.messages.create(messages=messages, **wishes)
    assert [block.model_dump(include={"type", "text"}) for block in whole.content] == [
        {"type": "text", "text": PARIS}
    ]
    assert (whole.stop_reason, whole.role) == ("end_turn", "assistant")
    count = claude.messages.count_tokens(model=real.model, messages=messages)
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with claude.messages.stream(messages=messages, **wishes) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == PARIS
    assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", usage.output_tokens)


def test_a_stop_sequence_and_a_beginning_are_kept(real: Server, claude: Any) -> None:
    begins: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    message = claude.messages.create(
        model=real.model,
        max_tokens=24,
        messages=begins,
        stop_sequences=["."],
        extra_body=GREEDY,
    )
    assert message.content[0].model_dump()["text"] == " Paris"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")


def test_mistakes_reach_the_client_as_its_own_errors(real: Server, claude: Any) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="other", max_tokens=1, messages=messages)
    assert unknown.value.request_id
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        claude.messages.create(
            model=real.model, max_tokens=1, messages=[{"role": "user", "content": [image]}]
        )

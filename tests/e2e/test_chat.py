"""Chat completions through the real stack, with the `openai` client that people use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers.serving.server import Server

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server: Server, content: str = "Tell me about rivers.", **options: Any) -> Any:
    """A whole answer."""
    return server.client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": content}], **options
    )


def stream_text(server: Server, content: str, **options: Any) -> tuple[str, str | None]:
    """Text and finish reason of a streamed answer."""
    text, finish = "", None
    for chunk in ask(server, content, stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_the_real_model_answers_sensibly(real: Server) -> None:
    chunks = list(
        real.client.chat.completions.create(
            model=real.model,
            messages=FRANCE,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert chunks[-1].choices == []
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens >= 7


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 1, "seed": 8, "top_p": 0.9},
    ],
    ids=["greedy", "seeded", "seeded-nucleus"],
)
def test_streaming_equals_not_streaming(real: Server, sampling: dict[str, Any]) -> None:
    whole = ask(real, "Name three rivers.", max_tokens=24, **sampling).choices[0]
    text, finish = stream_text(real, "Name three rivers.", max_tokens=24, **sampling)
    assert (text, finish) == (whole.message.content, whole.finish_reason)
    assert len(text) > 10


def test_seeds_matter(tiny: Server) -> None:
    answers = {
        ask(tiny, max_tokens=16, temperature=1, seed=s).choices[0].message.content for s in range(4)
    }
    assert len(answers) == 4


async def test_32_concurrent_streams_equal_their_solo_runs(real: Server) -> None:
    client, model = real.async_client, real.model

    async def answer(number: int) -> str:
        pieces: list[str] = []
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Write a line about the number {number}."}],
            max_tokens=12,
            temperature=[0.0, 1.0][number % 2],
            seed=number,
            stream=True,
        )
        async for chunk in stream:
            pieces += [c.delta.content or "" for c in chunk.choices]
        return "".join(pieces)

    async with client:
        together = await asyncio.gather(*(answer(n) for n in range(32)))
        alone = [await answer(n) for n in range(32)]
    assert together == alone
    assert len(set(alone)) > 20


def test_choices_have_seeds_of_their_own(tiny: Server) -> None:
    three = ask(tiny, n=3, seed=5, temperature=1, max_tokens=12)
    assert [c.index for c in three.choices] == [0, 1, 2]
    texts = [c.message.content for c in three.choices]
    assert len(set(texts)) == 3
    one = ask(tiny, seed=6, temperature=1, max_tokens=12)
    assert one.choices[0].message.content == texts[1]  # choice i gets seed + i
    assert three.usage.completion_tokens == 36
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_streamed_choices_equal_whole_ones(tiny: Server) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1, "max_tokens": 12}
    whole = [c.message.content for c in ask(tiny, **options).choices]
    streamed = ["", "", ""]
    for chunk in ask(tiny, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole


def test_logprobs(real: Server) -> None:
    answer = real.client.chat.completions.create(
        model=real.model,
        messages=FRANCE,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(t.token for t in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy takes the best
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert bytes(token.bytes or []).decode() == token.token


def test_stop_strings_end_the_answer_and_are_not_in_it(real: Server) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    question = "What is the capital of France?"
    assert "France" in ask(real, question, **options).choices[0].message.content
    stopped = ask(real, question, stop=["xyz", "ance is"], **options).choices[0]
    assert stopped.message.content == "The capital of Fr"
    assert stopped.finish_reason == "stop"
    assert stream_text(real, question, stop=["ance is"], **options) == ("The capital of Fr", "stop")


def test_the_limit_of_tokens_is_kept(tiny: Server) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit: dict[str, Any] = {name: 9}
        answer = ask(tiny, temperature=0, extra_body={"ignore_eos": True}, **limit)
        assert answer.usage.completion_tokens == 9
        assert answer.choices[0].finish_reason == "length"


def test_ignore_eos_goes_past_the_end(real: Server) -> None:
    question = "What is the capital of France?"
    whole = ask(real, question, temperature=0, max_tokens=20)
    assert whole.choices[0].finish_reason == "stop"
    longer = ask(real, question, temperature=0, max_tokens=20, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 20
    assert longer.choices[0].finish_reason == "length"


def test_logit_bias_forbids_and_forces(real: Server) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    token: int = real.post("/tokenize", {"model": real.model, "prompt": " Paris"}).json["tokens"][
        -1
    ]
    forced = ask(real, "Hello!", logit_bias={str(token): 100}, **options)
    assert forced.choices[0].message.content == " Paris Paris Paris"
    question = "What is the capital of France?"
    answer = ask(real, question, logit_bias={str(token): -100}, temperature=0, max_tokens=12)
    assert " Paris" not in answer.choices[0].message.content


def test_the_second_same_prompt_is_cached(real: Server) -> None:
    question = "Explain how a water wheel turns the flow of a river into useful work. " * 3
    first, second = (ask(real, question, temperature=0, max_tokens=4) for _ in range(2))
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (first, second)]
    assert second.choices == first.choices or (
        second.choices[0].message.content == first.choices[0].message.content
    )
    assert cached[0] < 32  # the template's beginning, at most
    assert cached[1] >= first.usage.prompt_tokens - 16
    assert cached[1] < first.usage.prompt_tokens  # the last token is computed for its logits


def test_a_conversation_of_several_turns(real: Server) -> None:
    answer = real.client.chat.completions.create(
        model=real.model,
        messages=[
            {"role": "system", "content": "You answer with one word."},
            {"role": "user", "content": "What is the capital of Italy?"},
            {"role": "assistant", "content": "Rome"},
            {"role": "user", "content": [{"type": "text", "text": "And of France?"}]},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_ten_thousand_messages_are_answered_or_refused_by_name(tiny: Server) -> None:
    import openai

    messages: list[Any] = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(10_001)
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        tiny.client.chat.completions.create(model=tiny.model, messages=messages, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


def test_models_are_listed(real: Server) -> None:
    (model,) = real.client.models.list().data
    assert "SmolLM2" in model.id
    assert real.client.models.retrieve(model.id).id == model.id

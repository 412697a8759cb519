"""Plain completions: echo, token ids as prompts, several prompts, log-probabilities."""

from __future__ import annotations

from typing import Any

from helpers.serving.server import Server


def complete(server: Server, prompt: Any, **options: Any) -> Any:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | options
    return server.client.completions.create(model=server.model, prompt=prompt, **body)


def test_the_real_model_goes_on_with_a_text(real: Server) -> None:
    answer = complete(real, "The capital of France is", max_tokens=3)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.object == "text_completion"


def test_text_and_its_tokens_are_the_same_prompt(real: Server) -> None:
    text = "Water flows down the hill and"
    ids = real.post("/tokenize", {"model": real.model, "prompt": text}).json["tokens"]
    assert complete(real, ids).choices[0].text == complete(real, text).choices[0].text


def test_streaming_equals_not_streaming(real: Server) -> None:
    whole = complete(real, "Once upon a time", max_tokens=16)
    pieces = complete(real, "Once upon a time", max_tokens=16, stream=True)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text


def test_echo_puts_the_prompt_first(real: Server) -> None:
    plain = complete(real, "One, two, three,", max_tokens=4)
    echoed = complete(real, "One, two, three,", max_tokens=4, echo=True)
    assert echoed.choices[0].text == "One, two, three," + plain.choices[0].text


def test_echo_with_logprobs_scores_the_prompt(real: Server) -> None:
    answer = complete(real, "One, two, three,", max_tokens=2, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_several_prompts_are_several_choices(tiny: Server) -> None:
    prompts = ["alpha", "beta", "gamma"]
    many = complete(tiny, prompts, n=2, seed=3, temperature=1)
    assert [c.index for c in many.choices] == [0, 1, 2, 3, 4, 5]
    for number, prompt in enumerate(prompts):
        alone = complete(tiny, prompt, n=2, seed=3 + 2 * number, temperature=1)
        assert [c.text for c in alone.choices] == [
            c.text for c in many.choices[2 * number : 2 * number + 2]
        ]


def test_penalties_change_the_answer(tiny: Server) -> None:
    plain = complete(tiny, "x", max_tokens=32, extra_body={"ignore_eos": True})
    punished = complete(
        tiny,
        "x",
        max_tokens=32,
        frequency_penalty=2,
        presence_penalty=2,
        extra_body={"ignore_eos": True},
    )
    assert plain.choices[0].text != punished.choices[0].text

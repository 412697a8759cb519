"""The default model on the R1 path, served: OpenAI clients get the same text with and without drafting."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.serving.server import Server, serving

pytestmark = pytest.mark.real_model

QUESTIONS = ["What is the capital of France?", "Write two sentences about rivers."]


def answers(server: Server, *, streamed: bool) -> list[str | None]:
    """Greedy and seeded ones; with `streamed` once more that way, to be the same."""
    assert server.model == "smollm2-r1"
    texts: list[str | None] = []
    for question in QUESTIONS:
        messages: list[Any] = [{"role": "user", "content": question}]
        for temperature, seed in ((0.0, 0), (0.8, 7)):
            whole = server.client.chat.completions.create(
                model=server.model,
                messages=messages,
                max_tokens=48,
                temperature=temperature,
                seed=seed,
            )
            texts.append(whole.choices[0].message.content)
            if not streamed:
                continue
            stream = server.client.chat.completions.create(
                model=server.model,
                messages=messages,
                max_tokens=48,
                temperature=temperature,
                seed=seed,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert "".join(pieces) == texts[-1]
    return texts


@pytest.mark.thorough
def test_the_same_text_with_and_without_drafting() -> None:
    with serving("smollm2-r1", "--mtp", "0") as server:
        expected = answers(server, streamed=False)
    assert "Paris" in str(expected[0])
    with serving("smollm2-r1", "--mtp", "2") as server:
        assert answers(server, streamed=True) == expected
        drafted = re.search(
            r"^headrace_drafted_tokens_total\S* (\d+)",
            server.get("/metrics").body.decode(),
            re.MULTILINE,
        )
        assert drafted is not None and int(drafted[1]) > 0  # how many depends on what pays here

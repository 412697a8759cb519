"""The DeepSeek-V3 family on the CPU: equal to transformers in every branch, however a step is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.models.deepseek_oracle import CONFIGS, BackendName, build, expected, load, prompt
from helpers.models.stepping import Stepper

torch.set_num_threads(1)

BLOCK = 16
BACKENDS: list[BackendName] = ["native", "reference"]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, backend: BackendName, tmp_path: Path) -> None:
    oracle = build(tmp_path, **CONFIGS[name])
    stepper = Stepper(load(tmp_path, backend, block_tokens=BLOCK), BLOCK)
    tokens = prompt(90)
    wanted = expected(oracle, tokens)
    assert wanted.std() > 0.5  # so that the tolerance says something
    assert_close(stepper.whole(tokens), wanted)

    chunked = stepper.stream(tokens)
    pieces = [stepper.step([(chunked, n)])[0] for n in (40, 31, 13, *[1] * 6)]
    assert_close(torch.cat(pieces), wanted)

    cached = stepper.stream([*tokens[:50], *prompt(40, seed=7)], shared=chunked, cached=48)
    found = stepper.step([(cached, 42)])[0]
    assert_close(found, expected(oracle, list(cached.tokens))[48:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["as R1", "as SmolLM2"])
def test_logits_of_a_mixed_batch_equal_transformers(
    name: str, backend: BackendName, tmp_path: Path
) -> None:
    oracle = build(tmp_path, **CONFIGS[name])
    stepper = Stepper(load(tmp_path, backend, block_tokens=BLOCK), BLOCK)
    prompts = [prompt(4 + 5 * i % 37, seed=i) for i in range(17)]
    streams = [stepper.stream(tokens) for tokens in prompts]
    done = [stepper.step([(s, len(s.tokens) - i % 4) for i, s in enumerate(streams)])]
    while any(s.computed < len(s.tokens) for s in streams):
        done.append(stepper.step([(s, min(1, len(s.tokens) - s.computed)) for s in streams]))
    for i, tokens in enumerate(prompts):
        assert_close(torch.cat([step[i] for step in done]), expected(oracle, tokens))

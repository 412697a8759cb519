"""A number that is none fails the requests that meet it, by name, wherever in the model or its cache it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.wire.frames import Sampling
from headrace_kernels.torch_mla import REFERENCE
from helpers.models.broken_deepseek import (
    NOT_FINITE,
    PROMPT,
    SPOTS,
    BrokenDeepseek,
    native_engine,
    outcomes,
    spoil_cache,
    torch_engine,
)

torch.set_num_threads(1)

ENGINES: dict[str, Callable[[SafetensorsCheckpoint], Engine]] = {
    "torch, FP8": lambda checkpoint: torch_engine(checkpoint, REFERENCE, "cpu"),
    "native, float32": lambda checkpoint: native_engine(checkpoint, "float32"),
    "native, bfloat16": lambda checkpoint: native_engine(checkpoint, "bfloat16"),
    "native, int8": lambda checkpoint: native_engine(checkpoint, "int8"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_nan_in_any_weight_fails_the_request(name: str, tmp_path: Path) -> None:
    model = BrokenDeepseek(tmp_path)
    sound = outcomes(ENGINES[name](model.write()), PROMPT)
    assert [len(answer) for answer in sound] == [2]
    made_up = {
        spot: answer
        for spot in SPOTS
        if (answer := outcomes(ENGINES[name](model.write(spot)), PROMPT)) != [NOT_FINITE]
    }
    assert made_up == {}


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_beside_one_that_meets_a_nan_is_answered_as_ever(
    name: str, tmp_path: Path
) -> None:
    model = BrokenDeepseek(tmp_path)
    other = [60 + token for token in PROMPT]
    (sound,) = outcomes(ENGINES[name](model.write()), other, max_tokens=5)
    engine = ENGINES[name](model.write("model.embed_tokens.weight"))
    assert outcomes(engine, other, PROMPT, other, max_tokens=5) == [sound, NOT_FINITE, sound]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=3),
        Sampling(logprobs=3),
        Sampling(prompt_logprobs=2),
        Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=1),
    ],
)
@pytest.mark.parametrize("spot", ["layers.1.self_attn.o_proj.weight", "lm_head.weight"])
def test_however_tokens_are_chosen(spot: str, sampling: Sampling, tmp_path: Path) -> None:
    model = BrokenDeepseek(tmp_path)
    for make in (ENGINES["torch, FP8"], ENGINES["native, int8"]):
        assert outcomes(make(model.write(spot)), PROMPT, sampling=sampling) == [NOT_FINITE]


def test_a_nan_in_the_cache_fails_those_who_read_it_and_nobody_else(tmp_path: Path) -> None:
    engine = ENGINES["torch, FP8"](BrokenDeepseek(tmp_path).write())
    longer = [*PROMPT, 3]
    sound = outcomes(engine, longer)
    spoil_cache(engine)
    assert outcomes(engine, longer) == [NOT_FINITE]  # its prefix is cached
    assert outcomes(engine, longer, salt=b"new") == sound  # in blocks that hold NaN from before

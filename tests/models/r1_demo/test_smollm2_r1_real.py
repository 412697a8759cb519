"""The default model by the code of DeepSeek-R1: its own greedy answers, token for token. 25 s of a core in full."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import load_model
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve
from headrace.wire.frames import Sampling
from helpers.engine.toy import make_submit
from helpers.models.texts import TEXTS

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16


@pytest.fixture(scope="module")
def answer_tokens(pytestconfig: pytest.Config) -> int:
    return 64 if pytestconfig.option.all_cases else 8


def greedy(name: str, answer_tokens: int) -> list[list[int]]:
    """The answers of the model `name` to all texts, 20 at once."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))
    model = load_model(resolve(name), dtype="float32", device="cpu", block_tokens=BLOCK)
    model.allocate_kv(256)
    config = EngineConfig(
        num_blocks=256, block_tokens=BLOCK, max_sequences=len(TEXTS), max_batched_tokens=128
    )
    engine = Engine(model, config, KeyedBlockHasher(bytes(32), BLOCK))
    for number, text in enumerate(TEXTS):
        ids: list[int] = tokenizer.encode(text).ids
        sampling = Sampling(ignore_eos=True)
        engine.submit(make_submit(number, ids, max_tokens=answer_tokens, sampling=sampling))
    answers: list[list[int]] = [[] for _ in TEXTS]
    while not engine.idle:
        for output in engine.step().of(0).outputs:
            answers[output.request] += output.ids
    engine.check_idle()
    return answers


@pytest.fixture(scope="module")
def llama_answers(answer_tokens: int) -> list[list[int]]:
    answers = greedy("smollm2", answer_tokens)
    assert all(len(answer) == answer_tokens for answer in answers)
    return answers


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("name", ["smollm2-r1", "smollm2-r1-paired"])
def test_greedy_answers_are_those_of_the_llama_form(
    name: str, llama_answers: list[list[int]], answer_tokens: int
) -> None:
    assert greedy(name, answer_tokens) == llama_answers

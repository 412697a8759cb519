"""The default model against transformers on the same weights, and its bits in company, in chunks and after a cache.

Tolerance: both sides sum in float32 but in other orders, over 30 layers; logits have a standard deviation of about 4.
The greedy test does not generate with transformers: if its best token after every prefix of our answer is the next
token of our answer, then its greedy answer is ours, by induction, and one forward pass shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer

from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models import load_model
from headrace.models.llama import Llama
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve
from headrace.wire.frames import Sampling
from helpers.engine.toy import make_submit
from helpers.models.stepping import Stepper
from helpers.models.texts import TEXTS

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

BLOCK = 16


@pytest.fixture(scope="module")
def answer_tokens(pytestconfig: pytest.Config) -> int:
    return 64 if pytestconfig.option.all_cases else 12


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Llama:
    model = load_model(resolve(None), dtype="float32", device="cpu", block_tokens=BLOCK)
    assert isinstance(model, Llama)
    return model


@pytest.fixture(scope="module")
def long_prompt(folder: Path) -> list[int]:
    """256 tokens of English: messages of the golden tokenizer file, one after the other."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    golden = Path(__file__).parents[1] / "data" / "smollm2_tokens.json"
    texts = [text for text, _ in json.loads(golden.read_text(encoding="utf-8"))]
    ids: list[int] = tokenizer.encode(" ".join([*TEXTS, *texts])).ids
    assert len(ids) >= 256
    return ids[:256]


def test_logits_equal_transformers_and_do_not_depend_on_the_way(
    oracle: LlamaForCausalLM, model: Llama, long_prompt: list[int]
) -> None:
    with torch.inference_mode():
        expected = oracle(torch.tensor([long_prompt])).logits[0]
    stepper = Stepper(model, BLOCK, blocks=512)
    whole = stepper.whole(long_prompt)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-3)

    chunked = stepper.stream(long_prompt)
    pieces = [stepper.step([(chunked, n)])[0] for n in (100, 28, 127, 1)]
    assert torch.equal(torch.cat(pieces), whole)

    cached = stepper.stream(long_prompt, shared=chunked, cached=240)
    assert torch.equal(stepper.step([(cached, 16)])[0], whole[240:])

    # Of other lengths, in the same steps: whole first, then the last token decoded.
    for others in (6, 15, 31):
        company = [stepper.stream(long_prompt[i : i + 9 + i % 5]) for i in range(others)]
        stream = stepper.stream(long_prompt, shared=chunked, cached=192)
        rows = stepper.step([*((s, len(s.tokens) - 1) for s in company), (stream, 63)])[-1]
        last = stepper.step([(stream, 1), *((s, 1) for s in company)])[0]
        assert torch.equal(torch.cat([rows, last]), whole[192:])


def test_greedy_answers_equal_transformers(
    folder: Path, oracle: LlamaForCausalLM, model: Llama, answer_tokens: int
) -> None:
    """16 sequences decode at once, the others join as places come free."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts: list[list[int]] = [tokenizer.encode(text).ids for text in TEXTS]
    model.allocate_kv(256)
    config = EngineConfig(
        num_blocks=256, block_tokens=BLOCK, max_sequences=16, max_batched_tokens=64
    )
    engine = Engine(model, config, KeyedBlockHasher(bytes(32), BLOCK))
    for number, ids in enumerate(prompts):
        greedy = Sampling(ignore_eos=True)
        engine.submit(make_submit(number, ids, max_tokens=answer_tokens, sampling=greedy))
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    while not engine.idle:
        for output in engine.step().of(0).outputs:
            answers[output.request] += output.ids
    engine.check_idle()
    for number, ids in enumerate(prompts):
        answer = answers[number]
        assert len(answer) == answer_tokens
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids + answer[:-1]])).logits[0]
        assert logits[len(ids) - 1 :].argmax(-1).tolist() == answer, TEXTS[number]

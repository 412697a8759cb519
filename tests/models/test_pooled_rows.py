"""Hidden states that a forward pass gives: those that its head reads, whatever the cut, the company and the backend.

Tolerance against transformers: both sides sum in float32 in other orders; states after the last norm are of order 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models import DType, Model, load_model
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve
from headrace_kernels.torch_ops import REFERENCE, TorchBackend
from headrace_kernels.upload import tensor_of
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama

torch.set_num_threads(1)

BLOCK = 16


def prompt(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()


def native(path: Path, dtype: DType = "float32", **options: Any) -> Model:
    checkpoint = SafetensorsCheckpoint(path)
    return load_model(checkpoint, dtype=dtype, device="cpu", block_tokens=BLOCK, **options)


def reference(path: Path) -> Model:
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, BLOCK)
    backend = TorchBackend(attention, dtype="float32", device="cpu", kernels=REFERENCE)
    return Llama(checkpoint.config, load_weights(checkpoint, backend), backend, BLOCK)


def stepper(model: Model) -> Stepper:
    made = Stepper(model, BLOCK)
    made.pools = True
    return made


@torch.inference_mode()
def last_hidden_states(path: Path, tokens: list[int]) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert isinstance(oracle, LlamaForCausalLM)
    states = oracle.eval().model(torch.tensor([tokens])).last_hidden_state
    assert states is not None
    return states[0]


@pytest.mark.parametrize("make", [native, reference])
def test_hidden_states_equal_transformers(make: Any, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "llama", tie_word_embeddings=False)
    model, tokens = make(path), prompt(70)
    steps = stepper(model)
    stream = steps.stream(tokens)
    found: list[torch.Tensor] = []
    for count in (30, 39, 1):
        steps.step([(stream, count)])
        found += steps.hidden
    assert model.pooled_width == 64
    wanted = last_hidden_states(path, tokens)
    torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-4)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_hidden_states_of_the_default_model_equal_transformers() -> None:
    model = load_model(resolve(None), dtype="float32", device="cpu", block_tokens=BLOCK)
    tokens = [(31 * i) % 49_000 for i in range(40)]
    steps = stepper(model)
    steps.whole(tokens)
    wanted = last_hidden_states(ensure_default_model(), tokens)
    # thirty layers, and states up to 50
    torch.testing.assert_close(steps.hidden[0], wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "deepseek", "deepseek drafting"])
def test_cuts_and_company_change_no_bit_and_the_head_reads_the_same(
    family: str, dtype: DType, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if family == "llama":
        model = native(tiny_llama(path, tie_word_embeddings=False), dtype)
    else:
        mtp = family == "deepseek drafting"
        tiny_deepseek(path, mtp=mtp)
        model = native(path, dtype, mtp=mtp)
    tokens = prompt(60)
    steps = stepper(model)
    logits = steps.whole(tokens)
    whole = steps.hidden[0]
    assert whole.shape == (60, model.pooled_width)
    if dtype == "float32":
        shape = (model.vocab_size, model.pooled_width)
        head = tensor_of(SafetensorsCheckpoint(path).tensor("lm_head.weight", shape))
        torch.testing.assert_close(whole @ head.float().T, logits, rtol=0, atol=1e-4)
    stream, other = steps.stream(tokens), steps.stream(prompt(30, seed=1))
    found: list[torch.Tensor] = []
    for count in (1, 16, 43):
        steps.step([(other, 5), (stream, count)])
        found.append(steps.hidden[1])
    assert torch.equal(torch.cat(found), whole)


def test_rows_that_nobody_pools_cost_nothing(tmp_path: Path) -> None:
    steps = Stepper(native(tiny_llama(tmp_path / "llama")), BLOCK)
    steps.whole(prompt(20))
    assert steps.model.pooled().size == 0

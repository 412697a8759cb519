"""The llama family on the CPU: equal to transformers, and bitwise indifferent to how a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from headrace.models import DType, UnsupportedModelError, load_model
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.torch_ops import REFERENCE, TorchBackend
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.stepping import Stepper

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

torch.set_num_threads(1)

BLOCK = 16
VOCAB = 320
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "odd sizes": {
        "hidden_size": 42,
        "intermediate_size": 75,
        "head_dim": 20,
        "num_attention_heads": 3,
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "untied": {"tie_word_embeddings": False},
    "linear rope": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": ROPE
        | {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope": {
        "rope_parameters": ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
}


def build(path: Path, **changes: Any) -> LlamaForCausalLM:
    """A tiny random llama of transformers, saved to `path`."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3 if changes.get("num_attention_heads") == 3 else 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        "rope_parameters": ROPE,
    } | changes
    torch.manual_seed(1)
    oracle = LlamaForCausalLM(LlamaConfig(**config)).eval()
    for name, parameter in oracle.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    oracle.save_pretrained(path)
    return oracle


def load(path: Path, dtype: DType = "float32") -> Llama:
    model = load_model(SafetensorsCheckpoint(path), dtype=dtype, device="cpu", block_tokens=BLOCK)
    assert isinstance(model, Llama)
    return model


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


@torch.inference_mode()
def expected(oracle: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = build(tmp_path, **CONFIGS[name])
    stepper = Stepper(load(tmp_path), BLOCK)
    tokens = prompt(150)
    torch.testing.assert_close(stepper.whole(tokens), expected(oracle, tokens), rtol=0, atol=1e-4)


def test_the_torch_reference_runs_the_same_description(tmp_path: Path) -> None:
    oracle = build(tmp_path, attention_bias=True)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    attention = attention_of(checkpoint.config, BLOCK)
    backend = TorchBackend(attention, dtype="float32", device="cpu", kernels=REFERENCE)
    model = Llama(checkpoint.config, load_weights(checkpoint, backend), backend, BLOCK)
    tokens = prompt(70)
    stepper = Stepper(model, BLOCK)
    stream = stepper.stream(tokens)
    logits = torch.cat([stepper.step([(stream, n)])[0] for n in (30, 39, 1)])
    torch.testing.assert_close(logits, expected(oracle, tokens), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build(path)
    return path


DTYPES: list[DType] = ["float32", "bfloat16", "float16", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[64, 64, 22], [1] * 150, [7, 100, 43], [149, 1]])
def test_chunks_and_decode_give_the_bits_of_one_prefill(
    tiny: Path, dtype: DType, cuts: list[int]
) -> None:
    stepper = Stepper(load(tiny, dtype), BLOCK)
    tokens = prompt(150)
    whole = stepper.whole(tokens)
    stream = stepper.stream(tokens)
    pieces = [stepper.step([(stream, n)])[0] for n in cuts]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cached_prefix_changes_no_bit(tiny: Path, dtype: DType) -> None:
    stepper = Stepper(load(tiny, dtype), BLOCK)
    tokens = prompt(100)
    whole = stepper.whole(tokens)
    first = stepper.stream(tokens[:70] + prompt(9, seed=3))
    stepper.step([(first, 79)])
    for cached in (16, 64):
        stream = stepper.stream(tokens, shared=first, cached=cached)
        assert torch.equal(stepper.step([(stream, 100 - cached)])[0], whole[cached:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [1, 6, 31])
def test_company_changes_no_bit(tiny: Path, dtype: DType, others: int) -> None:
    stepper = Stepper(load(tiny, dtype), BLOCK, blocks=1024)
    prompts = [prompt(5 + 7 * i % 90, seed=i) for i in range(others + 1)]
    alone = [stepper.whole(tokens) for tokens in prompts]
    streams = [stepper.stream(tokens) for tokens in prompts]
    # Mixed: some prefill whole, some a chunk, then all decode together to their ends.
    done = [stepper.step([(s, max(1, len(s.tokens) - 3 * (i % 3))) for i, s in enumerate(streams)])]
    while any(s.computed < len(s.tokens) for s in streams):
        work = [(s, min(1, len(s.tokens) - s.computed)) for s in streams]
        done.append(stepper.step(work))
    for i, want in enumerate(alone):
        assert torch.equal(torch.cat([step[i] for step in done]), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_give_the_same_bits(tiny: Path, dtype: DType) -> None:
    checkpoint = SafetensorsCheckpoint(tiny)
    attention = attention_of(checkpoint.config, BLOCK)
    results: list[torch.Tensor] = []
    for simd in ("avx512", "avx2", "portable"):
        try:
            backend = TensorBackend(attention, dtype=dtype, simd=simd)
        except ValueError:
            continue  # this machine lacks it
        model = Llama(checkpoint.config, load_weights(checkpoint, backend), backend, BLOCK)
        results.append(Stepper(model, BLOCK).whole(prompt(83)))
    assert results and all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.1)]
)
def test_narrow_weights_stay_close(tiny: Path, dtype: DType, tolerance: float) -> None:
    tokens = prompt(40)
    exact = Stepper(load(tiny), BLOCK).whole(tokens)
    narrow = Stepper(load(tiny, dtype), BLOCK).whole(tokens)
    # Relative to the spread of the logits: rounding of weights, not a wrong layout.
    assert (narrow - exact).abs().max() / exact.std() < tolerance


def test_other_block_sizes(tiny: Path) -> None:
    tokens = prompt(77)
    whole = Stepper(load(tiny), BLOCK).whole(tokens)
    model = load_model(SafetensorsCheckpoint(tiny), dtype="float32", device="cpu", block_tokens=48)
    assert torch.equal(Stepper(model, 48).whole(tokens), whole)
    with pytest.raises(ValueError, match="multiple of 16"):
        load_model(SafetensorsCheckpoint(tiny), dtype="float32", device="cpu", block_tokens=24)


def test_a_step_that_does_not_fit_is_refused(tiny: Path) -> None:
    stepper = Stepper(load(tiny), BLOCK, blocks=4)
    stream = stepper.stream(prompt(20))
    stream.blocks = [2, 4]
    with pytest.raises(ValueError, match="slots holds 64, which is not below 64"):
        stepper.step([(stream, 20)])
    stream = stepper.stream([VOCAB])
    with pytest.raises(ValueError, match="tokens holds 320"):
        stepper.step([(stream, 1)])
    stream = stepper.stream([-1])
    with pytest.raises(ValueError, match="tokens holds -1"):
        stepper.step([(stream, 1)])


def test_rope_types_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    build(tmp_path, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        load(tmp_path)

"""A tiny DeepSeek-V3 in FP8 with one number in it that is none, and an engine on it."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.wire.frames import Sampling
from headrace_kernels.torch_mla import MlaKernels, TorchMlaBackend
from helpers.engine.toy import ToyHasher, make_submit
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.tiny_deepseek import (
    Tensors,
    quantise_fp8,
    save_tensors,
    tiny_config,
    tiny_tensors,
)
from helpers.models.tiny_model import write_json_files

BLOCK = 16  # the least that the native backend takes
NOT_FINITE = "the model's logits are not finite"
PROMPT = list(range(5, 25))  # a block and a bit
NAN = 0x7F  # in e4m3

# Parts of the names of all tensors of a layer of experts, of the dense one, and of those around them.
SPOTS = (
    "model.embed_tokens.weight",
    "layers.1.input_layernorm.weight",
    "layers.1.self_attn.q_a_proj.weight",
    "layers.1.self_attn.q_a_proj.weight_scale_inv",
    "layers.1.self_attn.q_a_layernorm.weight",
    "layers.1.self_attn.q_b_proj.weight",
    "layers.1.self_attn.kv_a_proj_with_mqa.weight",
    "layers.1.self_attn.kv_a_layernorm.weight",
    "layers.1.self_attn.kv_b_proj.weight",
    "layers.1.self_attn.o_proj.weight",
    "layers.1.post_attention_layernorm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.down_proj.weight_scale_inv",
    "layers.1.mlp.gate.weight",
    "layers.1.mlp.gate.e_score_correction_bias",
    "layers.1.mlp.shared_experts.gate_proj.weight",
    "layers.1.mlp.shared_experts.down_proj.weight",
    "layers.1.mlp.experts.*.gate_proj.weight",
    "layers.1.mlp.experts.*.up_proj.weight",
    "layers.1.mlp.experts.*.down_proj.weight",
    "layers.1.mlp.experts.*.up_proj.weight_scale_inv",
    "model.norm.weight",
    "lm_head.weight",
)


class BrokenDeepseek:
    """Checkpoints that differ in one place. `*` in the name of a tensor stands for each expert."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = tiny_config() | {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        self._tensors, _ = quantise_fp8(tiny_tensors(self._raw))
        write_json_files(path, self._raw)

    def write(self, spot: str | None = None) -> SafetensorsCheckpoint:
        """With a NaN as the first number of that tensor, or, in the embedding, of a token of the prompt."""
        tensors: Tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        experts = range(self._raw["n_routed_experts"]) if spot and "*" in spot else [0]
        for expert in experts if spot else []:
            named = (spot or "").replace("*", str(expert))
            (name,) = (name for name in tensors if name.endswith(named))
            place = PROMPT[3] if "embed" in name else 0
            tensor = tensors[name][place]
            if tensors[name].dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8)[0] = NAN
            else:
                tensors[name].view(tensors[name].shape[0], -1)[place, 0] = torch.nan
        save_tensors(self._path, tensors)
        return SafetensorsCheckpoint(self._path)


def torch_engine(checkpoint: SafetensorsCheckpoint, kernels: MlaKernels, device: str) -> Engine:
    """FP8 weights and an FP8 cache."""
    attention = attention_of(checkpoint.config, BLOCK, mtp=False)
    backend = TorchMlaBackend(
        attention, dtype="float32", device=device, kernels=kernels, kv_dtype="float8_e4m3fn"
    )
    weights = load_weights(checkpoint, backend, mtp=False, fp8=backend)
    return _engine(Deepseek(checkpoint.config, weights, backend, BLOCK))


def native_engine(checkpoint: SafetensorsCheckpoint, dtype: str) -> Engine:
    """Weights are dequantised when they are loaded."""
    backend = TensorBackend(attention_of(checkpoint.config, BLOCK, mtp=False), dtype=dtype)
    weights = load_weights(checkpoint, backend, mtp=False)
    return _engine(Deepseek(checkpoint.config, weights, backend, BLOCK))


def _engine(model: Deepseek) -> Engine:
    model.allocate_kv(32)
    config = EngineConfig(num_blocks=32, block_tokens=BLOCK, max_sequences=4, max_batched_tokens=64)
    return Engine(model, config, ToyHasher(BLOCK))


def outcomes(
    engine: Engine,
    *prompts: list[int],
    sampling: Sampling | None = None,
    max_tokens: int = 2,
    salt: bytes = b"",
) -> list[list[int] | str]:
    """For each prompt the answer's tokens, or what the failure says."""
    said: list[list[int] | str] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(
            make_submit(number, prompt, max_tokens=max_tokens, sampling=sampling, salt=salt)
        )
    while not engine.idle:
        answers = engine.step().of(0)
        for output in answers.outputs:
            tokens = said[output.request]
            assert isinstance(tokens, list)
            tokens += output.ids
        for failed in answers.failed:
            said[failed.request] = failed.message
    engine.check()
    engine.check_idle()
    return said


def spoil_cache(engine: Engine) -> None:
    """Make the first number of the newest layer NaN in every block of the cache, used or not."""
    region = engine.model.kv_pool().groups[-1][-1]
    for block in range(engine.config.num_blocks):
        region.memory[region.offset + block * region.stride] = NAN

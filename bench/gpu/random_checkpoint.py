"""A checkpoint of random weights, made on the device when they are asked for: true sizes, no file.

It goes through the loader that real ones go through. Matrices of DeepSeek-V3 are in e4m3 with scales, as DeepSeek-R1
stores them, except those that the engine computes with in other types; those of a llama are as its config says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.models.config import ModelConfig, parse_config
from headrace.models.config_deepseek import DeepseekConfig
from headrace.models.fp8 import SCALE_SUFFIX, scale_shape
from headrace.models.load import doc
from headrace.models.load.checkpoint import EMBEDDING, HEAD, Checkpoint, TensorInfo

# config.json of deepseek-ai/DeepSeek-R1, as far as it says how the model computes.
R1_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
# The same layers, a few values wide, for a dry run.
TINY_CONFIG: dict[str, Any] = R1_CONFIG | {
    "vocab_size": 90,
    "hidden_size": 160,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
}

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct, likewise.
SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TINY_LLAMA_CONFIG: dict[str, Any] = SMOLLM2_CONFIG | {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


class RandomCheckpoint(Checkpoint):
    """`raw` is a config.json. Equal seeds give equal weights."""

    def __init__(self, raw: Mapping[str, Any], device: torch.device, seed: int = 0) -> None:
        super().__init__("random", Path("random"), parse_config(raw))
        layers = range(self.config.num_layers)
        family = _llama_infos if self.config.deepseek is None else _infos
        self._infos = family(self.config, layers)
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def stacked(self, parts: Sequence[Any]) -> Any:
        return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))

    def _load(self, name: str) -> Any:
        """On the device, where other checkpoints give arrays of the host."""
        info = self._infos[name]
        dtype: torch.dtype = getattr(torch, info.dtype)
        if name.endswith(SCALE_SUFFIX):
            _, n_in = self._infos[name.removesuffix(SCALE_SUFFIX)].shape
            return torch.full(info.shape, 1 / math.sqrt(n_in), device=self._device)
        drawn = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        x = torch.randn(info.shape, generator=self._random, device=self._device, dtype=drawn)
        if len(info.shape) == 1:
            return x.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        return x.to(dtype) if drawn != dtype else x.mul_(1 / math.sqrt(info.shape[-1]))

    def sample(self, name: str) -> bytes:
        raise NotImplementedError(f"{name}: nobody serves random weights")

    def model_files(self) -> doc.ModelFiles:
        raise NotImplementedError("random weights have no tokenizer")


def layer_bytes(config: ModelConfig, layer: int) -> int:
    """Of the weights of a layer."""
    prefix = f"model.layers.{layer}."
    infos = _infos(config, range(layer, layer + 1))
    return sum(x.nbytes for name, x in infos.items() if name.startswith(prefix))


def _infos(config: ModelConfig, layers: range) -> dict[str, TensorInfo]:
    deepseek = config.deepseek
    assert deepseek is not None
    hidden = config.hidden_size
    infos: dict[str, TensorInfo] = {}

    def add(name: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> None:
        size = getattr(torch, dtype).itemsize
        infos[name] = TensorInfo("random", dtype, shape, math.prod(shape) * size)

    def fp8(name: str, n_out: int, n_in: int) -> None:
        add(f"{name}.weight", (n_out, n_in), "float8_e4m3fn")
        add(f"{name}.weight{SCALE_SUFFIX}", scale_shape((n_out, n_in)), "float32")

    def mlp(name: str, width: int) -> None:
        fp8(f"{name}.gate_proj", width, hidden)
        fp8(f"{name}.up_proj", width, hidden)
        fp8(f"{name}.down_proj", hidden, width)

    add(EMBEDDING, (config.vocab_size, hidden))
    for layer in layers:
        prefix = f"model.layers.{layer}"
        _attention(config, deepseek, f"{prefix}.self_attn", add, fp8)
        add(f"{prefix}.input_layernorm.weight", (hidden,))
        add(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        if layer < deepseek.dense_layers:
            mlp(f"{prefix}.mlp", config.intermediate_size)
            continue
        add(f"{prefix}.mlp.gate.weight", (deepseek.experts, hidden))
        add(f"{prefix}.mlp.gate.e_score_correction_bias", (deepseek.experts,), "float32")
        mlp(f"{prefix}.mlp.shared_experts", deepseek.shared_experts * deepseek.expert_size)
        for expert in range(deepseek.experts):
            mlp(f"{prefix}.mlp.experts.{expert}", deepseek.expert_size)
    add("model.norm.weight", (hidden,))
    add(HEAD, (config.vocab_size, hidden))
    return infos


def _llama_infos(config: ModelConfig, layers: range) -> dict[str, TensorInfo]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in layers:
        prefix = f"model.layers.{layer}"
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (n, hidden) for name, n in outputs.items()}
        shapes |= {
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    size = torch.bfloat16.itemsize
    return {
        name: TensorInfo("random", "bfloat16", shape, math.prod(shape) * size)
        for name, shape in shapes.items()
    }


def _attention(
    config: ModelConfig, deepseek: DeepseekConfig, prefix: str, add: Any, fp8: Any
) -> None:
    hidden, heads = config.hidden_size, config.num_heads
    assert deepseek.q_lora_rank is not None
    fp8(f"{prefix}.q_a_proj", deepseek.q_lora_rank, hidden)
    add(f"{prefix}.q_a_layernorm.weight", (deepseek.q_lora_rank,))
    fp8(f"{prefix}.q_b_proj", heads * (deepseek.nope_dim + deepseek.rope_dim), deepseek.q_lora_rank)
    fp8(f"{prefix}.kv_a_proj_with_mqa", deepseek.kv_lora_rank + deepseek.rope_dim, hidden)
    add(f"{prefix}.kv_a_layernorm.weight", (deepseek.kv_lora_rank,))
    # In bfloat16, as the engine keeps it.
    width = deepseek.nope_dim + deepseek.v_dim
    add(f"{prefix}.kv_b_proj.weight", (heads * width, deepseek.kv_lora_rank))
    fp8(f"{prefix}.o_proj", hidden, heads * deepseek.v_dim)

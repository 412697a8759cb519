"""DeepSeek-V3 of transformers as the oracle: tiny, random in every weight, and saved as a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from headrace.models.checkpoint import SafetensorsCheckpoint
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace_kernels.torch_mla import REFERENCE, TorchMlaBackend

BackendName = Literal["native", "reference"]

VOCAB = 320
CONTEXT = 512
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
YARN: dict[str, Any] = ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
LONGROPE: dict[str, Any] = ROPE | {
    "rope_type": "longrope",
    "factor": 1.0,
    "attention_factor": 1.0,
    "short_factor": [1.0, 1.5, 2.5, 4.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0],
    "original_max_position_embeddings": CONTEXT,
}
# R1's shape, small, but for what each name says.
CONFIGS: dict[str, dict[str, Any]] = {
    "as R1": {},
    "plain queries": {"q_lora_rank": None},
    "no nope": {"qk_nope_head_dim": 0},
    "as SmolLM2": {
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": LONGROPE,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 8.0,
    },
    "yarn": {"rope_parameters": YARN},
    "yarn, sharper scores only": {"rope_parameters": YARN | {"mscale": 1.0}},
    "longrope": {"rope_parameters": LONGROPE},
    "biases": {"attention_bias": True},
    "no dense layer": {"first_k_dense_replace": 0},
    "all dense": {"first_k_dense_replace": 3},
    "two shared experts": {"n_shared_experts": 2},
    "one group": {"n_group": 1, "topk_group": 1},
    "four groups": {"n_group": 4, "topk_group": 3},
    "weights as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "halves turn together": {"rope_interleave": False},
    "tied": {"tie_word_embeddings": True},
    "odd sizes": {
        "hidden_size": 44,
        "intermediate_size": 70,
        "moe_intermediate_size": 19,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 21,
        "kv_lora_rank": 27,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 11,
    },
}


def build(path: Path, **changes: Any) -> DeepseekV3ForCausalLM:
    """A tiny random model, saved to `path`. Constants that transformers starts from are made random too."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "max_position_embeddings": CONTEXT,
        "num_mtp_layers": 0,
        "rope_parameters": ROPE,
        "rms_norm_eps": 1e-5,  # unlike that of the norms inside of attention
    } | changes
    torch.manual_seed(1)
    oracle = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).eval()
    # torch's grouped product wants widths that divide by 4
    oracle.set_experts_implementation("eager")
    randomise(oracle)
    oracle.save_pretrained(path)
    return oracle


def randomise(module: torch.nn.Module) -> None:
    """Weights such that activations keep their size, norms and biases such that their absence shows."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        noise = torch.randn_like(parameter)
        if "inv_freq" in name:
            continue
        if "norm" in name:
            parameter.data.copy_(1 + 0.2 * noise)
        elif parameter.dim() == 1:
            parameter.data.copy_(0.2 * noise)
        else:
            parameter.data.copy_(noise / math.sqrt(parameter.shape[-1]))


@torch.inference_mode()
def expected(oracle: DeepseekV3ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits of all positions."""
    return oracle(torch.tensor([tokens])).logits[0]


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def load(
    path: Path,
    backend: BackendName,
    *,
    block_tokens: int,
    dtype: str = "float32",
    mtp: bool = False,
) -> Deepseek:
    """The checkpoint on one of the backends that a CPU has."""
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, block_tokens, mtp=mtp)
    if backend == "native":
        from headrace_kernels.native import NativeBackend

        made: Any = cast("Any", NativeBackend)(attention, dtype=dtype)
    else:
        made = TorchMlaBackend(attention, dtype=dtype, device="cpu", kernels=REFERENCE)
    weights = load_weights(checkpoint, made, mtp=mtp)
    return Deepseek(checkpoint.config, weights, made, block_tokens)

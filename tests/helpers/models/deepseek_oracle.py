"""DeepSeek-V3 of transformers as the oracle: tiny, random in every weight, and saved as a checkpoint.

Importing transformers takes seconds, so only what builds an oracle does it, and no pytest process that collects it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.ops import MlaBackend
from headrace_kernels.torch_mla import REFERENCE, TorchMlaBackend
from helpers.models.tiny_deepseek import SHAPE

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

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
    # So large that a norm inside of attention with it, rather than with its own 1e-6, shows.
    "a large epsilon": {"rms_norm_eps": 0.3},
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
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        **SHAPE,
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


def build_mtp(
    path: Path, index: int = 0, *, renamed: bool = False, **changes: Any
) -> tuple[DeepseekV3ForCausalLM, MtpLayer]:
    """A tiny model with a layer that drafts, counted `index` layers past the first possible one.

    `renamed` gives it the names of transformers instead of DeepSeek's.
    """
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3DecoderLayer,
        DeepseekV3RMSNorm,
    )

    oracle = build(path, num_mtp_layers=1, **changes)
    config = oracle.config
    kinds: Any = (DeepseekV3DecoderLayer, DeepseekV3RMSNorm)
    layer = MtpLayer(config, *kinds, layer_idx=config.num_hidden_layers).eval()
    randomise(layer)
    prefix = f"model.layers.{config.num_hidden_layers + index}."
    tensors = load_file(path / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        own = name if renamed else name.replace("mtp_block.", "")
        own = own if renamed else re.sub(r"^post_norm", "shared_head.norm", own)
        tensors[prefix + own] = tensor
    save_file(tensors, path / "model.safetensors")
    return oracle, layer


@dataclass(frozen=True, slots=True)
class Hidden:
    """Of the main model, for all positions `[tokens, hidden]`: before and after the final norm."""

    raw: torch.Tensor
    normed: torch.Tensor


@torch.inference_mode()
def hidden_states(oracle: DeepseekV3ForCausalLM, tokens: list[int]) -> Hidden:
    seen: list[Any] = []
    hook = oracle.model.norm.register_forward_hook(
        lambda _, given, made: seen.extend((given[0], made))
    )
    oracle.model(torch.tensor([tokens]))
    hook.remove()
    return Hidden(seen[0][0], seen[1][0])


@torch.inference_mode()
def mtp_rows(
    oracle: DeepseekV3ForCausalLM, layer: MtpLayer, tokens: list[int], hidden: torch.Tensor
) -> torch.Tensor:
    """The drafting layer up to its norm, written out: each token but the first, with the hidden state before it."""
    embeds = oracle.model.embed_tokens(torch.tensor([tokens[1:]]))
    x = layer.eh_proj(torch.cat((layer.enorm(embeds), layer.hnorm(hidden[None])), dim=-1))
    positions = torch.arange(1, len(tokens))[None]
    turns = oracle.model.rotary_emb(embeds, position_ids=positions)
    return layer.mtp_block(x, position_embeddings=turns, attention_mask=None)[0]


@torch.inference_mode()
def mtp_logits(oracle: DeepseekV3ForCausalLM, layer: MtpLayer, rows: torch.Tensor) -> torch.Tensor:
    return oracle.lm_head(cast("Any", layer).post_norm(rows))


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
        from helpers.kernels.tensor_backend import TensorBackend

        made: MlaBackend = TensorBackend(attention, dtype=dtype)
    else:
        made = TorchMlaBackend(attention, dtype=dtype, device="cpu", kernels=REFERENCE)
    weights = load_weights(checkpoint, made, mtp=mtp)
    return Deepseek(checkpoint.config, weights, made, block_tokens)

"""A tiny random DeepSeek-V3 checkpoint in Hugging Face form: same seed, same bytes, written in milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from helpers.models.tiny_model import tiny_tokenizer, write_json_files

Tensors = dict[str, torch.Tensor]

BLOCK = 128  # rows and columns that share a scale
E4M3_MAX = 448.0
# `quantization_config` of a checkpoint that `quantise_fp8` made.
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

# Low-rank queries, two groups of experts, a shared one and a dense first layer.
SHAPE: dict[str, Any] = {
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
}


def tiny_deepseek(
    path: Path, seed: int = 0, *, mtp: bool = False, fused: bool = False, **config: Any
) -> Path:
    """Write a DeepSeek-V3 of about 0.1 M parameters to `path` and return it. `config` overrides config.json.

    With `mtp` it has a layer that drafts, with `fused` the experts of a layer are one tensor.
    """
    raw = tiny_config(mtp=mtp) | config
    write_json_files(path, raw)
    save_tensors(path, tiny_tensors(raw, seed, fused=fused))
    return path


def tiny_config(*, mtp: bool = False) -> dict[str, Any]:
    """config.json of `SHAPE`."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": len(tiny_tokenizer()["model"]["vocab"]),
        **SHAPE,
        "norm_topk_prob": True,
        "v_head_dim": 16,
        "num_nextn_predict_layers": int(mtp),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_interleave": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }


def tiny_tensors(raw: Mapping[str, Any], seed: int = 0, *, fused: bool = False) -> Tensors:
    """Random weights under their Hugging Face names, scaled so that activations neither vanish nor explode."""
    random = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("draft_token_ids"):
            chosen = torch.randperm(raw["vocab_size"], generator=random)[: shape[0]]
            return chosen.sort().values.to(torch.int32)
        noise = torch.randn(shape, generator=random)
        if name.endswith("bias"):
            return 0.1 * noise
        return 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])

    return {name: draw(name, shape) for name, shape in deepseek_shapes(raw, fused=fused).items()}


def deepseek_shapes(raw: Mapping[str, Any], *, fused: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Hugging Face DeepSeek-V3 with this config.json."""
    hidden, vocab, layers = raw["hidden_size"], raw["vocab_size"], raw["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= layer_shapes(raw, layer, fused=fused)
    shapes["model.norm.weight"] = (hidden,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    if raw["num_nextn_predict_layers"]:
        shapes |= layer_shapes(raw, layers, fused=fused)
        prefix = f"model.layers.{layers}."
        norms = ("enorm", "hnorm", "shared_head.norm")
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        if size := raw.get("mtp_draft_vocab_size"):
            shapes[f"{prefix}draft_token_ids"] = (size,)
    return shapes


def layer_shapes(
    raw: Mapping[str, Any], layer: int, *, fused: bool = False
) -> dict[str, tuple[int, ...]]:
    """Of one decoder layer."""
    hidden, heads, rank = raw["hidden_size"], raw["num_attention_heads"], raw["kv_lora_rank"]
    nope, rope, v = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    q, q_rank, bias = heads * (nope + rope), raw["q_lora_rank"], raw["attention_bias"]
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + v), rank),
        "o_proj.weight": (hidden, heads * v),
    }
    if q_rank is None:
        attention["q_proj.weight"] = (q, hidden)
    else:
        attention["q_a_proj.weight"] = (q_rank, hidden)
        attention["q_a_layernorm.weight"] = (q_rank,)
        attention["q_b_proj.weight"] = (q, q_rank)
    if bias:
        attention |= {"kv_a_proj_with_mqa.bias": (rank + rope,), "o_proj.bias": (hidden,)}
    if bias and q_rank is not None:
        attention["q_a_proj.bias"] = (q_rank,)
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {
        f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
    }
    if layer < raw["first_k_dense_replace"]:
        shapes |= mlp_shapes("mlp", hidden, raw["intermediate_size"])
    else:
        shapes |= expert_shapes(raw, fused=fused)
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def expert_shapes(raw: Mapping[str, Any], *, fused: bool) -> dict[str, tuple[int, ...]]:
    hidden, width = raw["hidden_size"], raw["moe_intermediate_size"]
    experts, shared = raw["n_routed_experts"], raw["n_shared_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    if shared:
        shapes |= mlp_shapes("mlp.shared_experts", hidden, shared * width)
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, width)
        return shapes
    for expert in range(experts):
        shapes |= mlp_shapes(f"mlp.experts.{expert}", hidden, width)
    return shapes


def fuse_experts(tensors: Tensors) -> Tensors:
    """The experts of each layer as one tensor, as `transformers` has them in memory."""
    result = {name: x for name, x in tensors.items() if ".mlp.experts." not in name}
    layers = {name.split("experts.")[0] for name in tensors if ".mlp.experts." in name}
    for prefix in sorted(layers):
        count = len([name for name in tensors if name.startswith(f"{prefix}experts.")]) // 3

        def stacked(part: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            return torch.stack(
                [tensors[f"{prefix}experts.{e}.{part}.weight"] for e in range(count)]
            )

        gate_up = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
        result[f"{prefix}experts.gate_up_proj"] = gate_up
        result[f"{prefix}experts.down_proj"] = stacked("down_proj")
    return result


def quantise_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors as an FP8 checkpoint stores them, and what they are worth: what to compare with.

    As in DeepSeek's, norms, routers, biases, embedding, head and `eh_proj` stay as they are.
    """
    stored: Tensors = {}
    worth: Tensors = {}
    for name, tensor in tensors.items():
        kept = ("norm", "mlp.gate.", "embed_tokens", "lm_head", "eh_proj", ".bias", "correction")
        if any(part in name for part in kept) or tensor.dim() == 1:
            stored[name] = worth[name] = tensor
            continue
        values, scale_inv = quantise_blocks(tensor)
        stored[name], stored[f"{name}_scale_inv"] = values, scale_inv
        worth[name] = dequantise_blocks(values, scale_inv)
    return stored, worth


def quantise_blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values, and the factor of each block of 128 x 128 of the last two dimensions."""
    *leading, rows, columns = tensor.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(*leading, *blocks)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            part = (..., slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale = tensor[part].abs().amax((-2, -1), keepdim=True) / E4M3_MAX
            values[part] = (tensor[part] / scale).to(torch.float8_e4m3fn)
            scale_inv[..., i, j] = scale[..., 0, 0]
    return values, scale_inv


def dequantise_blocks(values: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Element by element, so that it shares no idea with what it is compared with."""
    result = values.float()
    for i in range(values.shape[-2]):
        for j in range(scale_inv.shape[-1]):
            result[..., i, j * BLOCK : (j + 1) * BLOCK] *= scale_inv[..., i // BLOCK, j, None]
    return result


def save_tensors(path: Path, tensors: Tensors, files: int = 1) -> None:
    """One file, or shards with an index."""
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

"""The fields of config.json that only DeepSeek-V3 has: latent attention, experts, multi-token prediction.

A field that is missing has the default of Hugging Face, which is that of DeepSeek-R1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from headrace.models.config_fields import Fields, ModelConfigError

__all__ = ["DeepseekConfig", "HiddenState", "read_deepseek"]

# The hidden state of a row after the final norm, or before it.
HiddenState = Literal["normed", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """Checked, sizes in elements. `ModelConfig.head_dim` is the rotated part of a head, as in Hugging Face."""

    q_lora_rank: int | None  # None: queries come from the hidden state in one step
    kv_lora_rank: int
    nope_dim: int  # of a head, not rotated; may be 0
    rope_dim: int  # of a head, rotated; its key is one for all heads
    v_dim: int
    rope_interleave: bool
    dense_layers: int  # so many first layers have an ordinary MLP
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_size: int  # width of one expert
    groups: int
    top_groups: int
    normalise_weights: bool
    routed_scale: float
    mtp_layers: int
    mtp_hidden_state: HiddenState  # what the first draft pass reads of the main model
    mtp_chain_hidden_state: HiddenState  # what a later one reads of the one before
    mtp_draft_vocab_size: int | None  # rows of a reduced draft head


def read_deepseek(config: Fields) -> DeepseekConfig:
    """Raises `ModelConfigError`."""
    config.choice("scoring_func", ("sigmoid",))
    config.choice("topk_method", ("noaux_tc",))
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "1: experts in every layer after the dense ones")
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.fail("num_key_value_heads", f"num_attention_heads, {heads}")
    rope_dim = config.integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise config.fail("qk_rope_head_dim", "an even number: rotary positions need pairs")
    result = DeepseekConfig(
        q_lora_rank=_q_lora_rank(config),
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        nope_dim=config.integer("qk_nope_head_dim", 128, low=0),
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim", 128),
        rope_interleave=config.flag("rope_interleave", True),
        dense_layers=config.integer("first_k_dense_replace", 3, low=0),
        experts=config.integer("n_routed_experts", 256),
        experts_per_token=config.integer("num_experts_per_tok", 8),
        shared_experts=config.integer("n_shared_experts", 1, low=0),
        expert_size=config.integer("moe_intermediate_size", 2048),
        groups=config.integer("n_group", 8),
        top_groups=config.integer("topk_group", 4),
        normalise_weights=config.flag("norm_topk_prob", True),
        routed_scale=config.number("routed_scaling_factor", 2.5),
        mtp_layers=_mtp_layers(config),
        mtp_hidden_state=_hidden_state(config, "mtp_hidden_state", "normed"),
        mtp_chain_hidden_state=_hidden_state(config, "mtp_chain_hidden_state", "raw"),
        mtp_draft_vocab_size=_draft_vocab_size(config),
    )
    _check_groups(config, result)
    _check_quantisation(config)
    return result


def _q_lora_rank(config: Fields) -> int | None:
    if "q_lora_rank" in config.raw and config.raw["q_lora_rank"] is None:
        return None
    return config.integer("q_lora_rank", 1536)


def _mtp_layers(config: Fields) -> int:
    """DeepSeek's name of the field, or that of transformers."""
    old, new = "num_nextn_predict_layers", "num_mtp_layers"
    if config.raw.get(old) is None:
        return config.integer(new, 1, low=0)
    layers = config.integer(old, low=0)
    if config.integer(new, layers, low=0) != layers:
        raise config.fail(new, f"{old}, {layers}")
    return layers


def _hidden_state(config: Fields, key: str, default: HiddenState) -> HiddenState:
    return cast("HiddenState", config.choice(key, ("normed", "raw"), default))


def _draft_vocab_size(config: Fields) -> int | None:
    key, vocab_size = "mtp_draft_vocab_size", config.integer("vocab_size")
    if config.raw.get(key) is None:
        return None
    size = config.integer(key)
    if size > vocab_size:
        raise config.fail(key, f"at most vocab_size, {vocab_size}")
    return size


def _check_groups(config: Fields, deepseek: DeepseekConfig) -> None:
    """A group is scored by its best two experts; the chosen groups must hold the experts of a token."""
    experts, groups = deepseek.experts, deepseek.groups
    if experts % groups or experts // groups < 2:
        raise config.fail(
            "n_group", f"groups of at least 2 of the {experts} n_routed_experts, all alike"
        )
    if deepseek.top_groups > groups:
        raise config.fail("topk_group", f"at most n_group, {groups}")
    within = deepseek.top_groups * (experts // groups)
    if deepseek.experts_per_token > within:
        raise config.fail(
            "num_experts_per_tok", f"at most the {within} experts of topk_group groups"
        )


def _check_quantisation(config: Fields) -> None:
    """None, or DeepSeek's: e4m3 in blocks of 128 x 128, each with a scale."""
    raw = config.table("quantization_config")
    if raw is None:
        return
    fields = Fields(f"{config.where}: quantization_config", raw)
    method = fields.text("quant_method")
    if method != "fp8":
        raise ModelConfigError(
            f"{fields.where}: quant_method {method!r} is not supported for deepseek_v3; supported: fp8"
        )
    fields.choice("fmt", ("e4m3",))
    fields.choice("activation_scheme", ("dynamic",))
    if raw.get("weight_block_size") != [128, 128]:
        raise fields.fail("weight_block_size", "[128, 128]")

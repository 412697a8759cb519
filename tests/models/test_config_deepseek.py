"""config.json of DeepSeek-V3: what is read, and what each fault is called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace.models.config import ModelConfig, ModelConfigError, parse_config
from headrace.models.rope import UnsupportedRopeError, attention_scale, rope_of

# The fields without a default; the others are those of DeepSeek-R1.
R1: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
}
R1_ROPE: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def longrope(short: float, long: float, **changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [short] * 32,
        "long_factor": [long] * 32,
    } | changes


def parse(**changes: Any) -> ModelConfig:
    return parse_config(R1 | changes, where="dir")


def test_defaults_are_those_of_r1() -> None:
    config = parse()
    deepseek = config.deepseek
    assert deepseek is not None
    assert (deepseek.q_lora_rank, deepseek.kv_lora_rank) == (1536, 512)
    assert (deepseek.nope_dim, deepseek.rope_dim, deepseek.v_dim) == (128, 64, 128)
    assert (deepseek.experts, deepseek.experts_per_token, deepseek.shared_experts) == (256, 8, 1)
    assert (deepseek.groups, deepseek.top_groups, deepseek.dense_layers) == (8, 4, 3)
    assert (deepseek.routed_scale, deepseek.normalise_weights) == (2.5, True)
    assert (deepseek.mtp_layers, deepseek.mtp_draft_vocab_size) == (1, None)
    assert (deepseek.mtp_hidden_state, deepseek.mtp_chain_hidden_state) == ("normed", "raw")
    assert deepseek.rope_interleave
    assert (config.head_dim, config.num_kv_heads) == (64, 128)
    assert parse_config({k: v for k, v in R1.items() if k[:3] != "max"}).context_tokens == 4096


def test_a_null_q_lora_rank_means_no_low_rank_queries() -> None:
    config = parse(q_lora_rank=None, qk_nope_head_dim=0, n_shared_experts=0)
    assert config.deepseek is not None
    assert config.deepseek.q_lora_rank is None
    assert config.deepseek.nope_dim == 0


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_either_name_of_the_mtp_layers_is_read(key: str) -> None:
    config = parse(**{key: 0})
    assert config.deepseek is not None
    assert config.deepseek.mtp_layers == 0


def test_fp8_of_deepseek_is_accepted() -> None:
    assert parse(quantization_config=FP8).deepseek is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: expected an integer of at least 1, found 0"),
        ({"q_lora_rank": "1536"}, 'q_lora_rank: expected an integer of at least 1, found "1536"'),
        ({"qk_nope_head_dim": -1}, "qk_nope_head_dim: expected an integer of at least 0, found -1"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: expected num_attention_heads, 128"),
        ({"scoring_func": "softmax"}, 'scoring_func: expected "sigmoid", found "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method: expected "noaux_tc", found "greedy"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not known to deepseek_v3"),
        ({"n_group": 7}, "n_group: expected groups of at least 2 of the 256 n_routed_experts"),
        ({"n_group": 256}, "n_group: expected groups of at least 2"),
        ({"topk_group": 9}, "topk_group: expected at most n_group, 8, found 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most the 128 experts"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: expected a finite number above 0"),
        ({"rope_interleave": 1}, "rope_interleave: expected true or false, found 1"),
        (
            {"num_nextn_predict_layers": 1, "num_mtp_layers": 2},
            "num_mtp_layers: expected num_nextn_predict_layers, 1, found 2",
        ),
        ({"mtp_hidden_state": "both"}, 'mtp_hidden_state: expected "normed" or "raw"'),
        ({"mtp_chain_hidden_state": 1}, "mtp_chain_hidden_state: expected a string, found 1"),
        ({"mtp_draft_vocab_size": 129281}, "mtp_draft_vocab_size: expected at most vocab_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, 'fmt: expected "e4m3", found "e5m2"'),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme: exp"),
        (
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "quantization_config: weight_block_size: expected [128, 128], found [64, 64]",
        ),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type 'su' is not known"),
        (
            {"rope_parameters": longrope(1.0, 1.0, short_factor=[1.0] * 31)},
            "short_factor: expected 32 numbers, one a frequency, found 31",
        ),
        (
            {"rope_parameters": longrope(1.0, 1.0, long_factor=[-1.0] * 32)},
            "long_factor: expected a list of numbers above 0",
        ),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse(**change)
    assert str(caught.value).startswith("dir/config.json")
    assert text in str(caught.value)


def test_yarn_of_r1_sharpens_the_scores_and_not_the_angles() -> None:
    config = parse(rope_scaling=R1_ROPE)
    assert rope_of(config).scale == 1.0
    temperature = 0.1 * math.log(40) + 1
    assert attention_scale(config, 192) == pytest.approx(192**-0.5 * temperature**2)
    flat = parse(rope_scaling=R1_ROPE | {"mscale_all_dim": 0})
    assert attention_scale(flat, 192) == 192**-0.5
    assert attention_scale(parse(), 192) == 192**-0.5


def test_longrope_divides_each_frequency() -> None:
    plain, halved = rope_of(parse()), rope_of(parse(rope_parameters=longrope(2.0, 2.0)))
    np.testing.assert_allclose(halved.inv_freq, plain.inv_freq / 2, rtol=1e-6)
    assert halved.scale == 1.0
    stretched = longrope(2.0, 2.0, original_max_position_embeddings=4096)
    expected = math.sqrt(1 + math.log(40) / math.log(4096))
    assert rope_of(parse(rope_parameters=stretched)).scale == pytest.approx(expected)


def test_longrope_that_depends_on_the_length_is_refused() -> None:
    both = longrope(1.0, 2.0, original_max_position_embeddings=163840)
    assert rope_of(parse(rope_parameters=both)).scale == 1.0  # no sequence reaches the long ones
    both["original_max_position_embeddings"] = 4096
    with pytest.raises(UnsupportedRopeError, match=r"longrope .* original_max_position_embeddings"):
        rope_of(parse(rope_parameters=both))

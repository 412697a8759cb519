"""config.json and generation_config.json: what is read, and what each fault is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.config import ModelConfigError, parse_config, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def test_defaults_are_those_of_hugging_face() -> None:
    config = parse_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope.rope_type == "default"
    assert config.rope.theta == 10_000.0
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_of_every_transformers_version_reads_the_same(rope: dict[str, Any]) -> None:
    config = parse_config(LLAMA | rope)
    assert (config.rope.rope_type, config.rope.theta) == ("linear", 5e5)
    assert config.rope.fields.number("factor") == 2.0


def test_eos_ids_of_the_generation_config_win() -> None:
    generation = {"eos_token_id": [7, 9, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 0}
    config = parse_config(LLAMA, generation)
    assert config.eos_token_ids == (7, 9)
    assert config.generation.temperature == 0.6
    assert config.generation.top_k == 0
    assert parse_config(LLAMA, {"temperature": 0}).generation.temperature == 0.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab_size": None}, "vocab_size: expected an integer of at least 1, found null"),
        ({"hidden_size": "64"}, 'hidden_size: expected an integer of at least 1, found "64"'),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer of at least 1, found 0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: expected an integer"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value"),
        ({"num_attention_heads": 6}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known: deepseek_v3, llama"),
        ({"model_type": 3}, "model_type: expected a string, found 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not known"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number"),
        ({"rope_theta": -1.0}, "rope_theta: expected a finite number above 0"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_type 'su' is not known"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: expected a number above 0, the field"),
        ({"rope_scaling": [1]}, "rope_scaling: expected an object, found [1]"),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
            "rope_theta is 1, but 2 inside rope_parameters",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "one set for all layers is expected, found ['full_attention']",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "method 'awq' is not supported"),
        ({"eos_token_id": 320}, "eos_token_id: expected token ids from 0 to 319, found 320"),
        ({"eos_token_id": ["a"]}, 'eos_token_id: expected token ids from 0 to 319, found ["a"]'),
        ({"torch_dtype": "int4"}, "torch_dtype: expected float32, bfloat16"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse_config(LLAMA | change, where="dir")
    assert str(caught.value).startswith("dir/config.json")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"top_p": 1.5}, {"temperature": -1}, {"temperature": False}, {"top_k": -1}]
)
def test_a_bad_generation_default_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(
        ModelConfigError, match=rf"generation_config.json: {next(iter(change))}: expected"
    ):
        parse_config(LLAMA, change)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[]", "expected a JSON object")],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=text):
        read_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config.json: cannot be read: No such file"):
        read_config(tmp_path)


def test_both_files_of_a_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3]}')
    assert read_config(tmp_path).eos_token_ids == (3,)

"""What a model is: Hugging Face `config.json`, checked field by field into one frozen `ModelConfig`.

Nothing past this file sees an unchecked value. What only one family has is read in a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from headrace.models.config_deepseek import DeepseekConfig, read_deepseek
from headrace.models.config_fields import Fields, ModelConfigError, ModelFileError, read_json_object

__all__ = [
    "ROPE_TYPES",
    "Fields",
    "GenerationDefaults",
    "ModelConfig",
    "ModelConfigError",
    "ModelFileError",
    "RopeConfig",
    "parse_config",
    "read_config",
    "read_json_object",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `raw` holds the parameters of `rope_type`, already checked to be there."""

    rope_type: str
    theta: float
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def fields(self) -> Fields:
        return Fields("config.json: rope parameters", self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint itself asks for where a request says nothing. None: it does not say either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checked config.json. Sizes are in elements, `context_tokens` in tokens."""

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    rope: RopeConfig
    context_tokens: int
    dtype: str  # of the stored weights as the config names it: "float32", "bfloat16", "float16"
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    deepseek: DeepseekConfig | None = None  # where `model_type` is deepseek_v3
    raw: Mapping[str, Any]  # config.json as it is, for what only one family has

    @property
    def fields(self) -> Fields:
        """The raw fields, to be read with named errors."""
        return Fields("config.json", self.raw)


def read_config(directory: Path) -> ModelConfig:
    """The checked configuration of a Hugging Face model directory."""
    generation = directory / "generation_config.json"
    return parse_config(
        read_json_object(directory / "config.json"),
        read_json_object(generation) if generation.exists() else {},
        where=str(directory),
    )


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = ""
) -> ModelConfig:
    """Check `config.json` (and `generation_config.json`), both as parsed JSON; `where` prefixes the errors."""
    prefix = f"{where.rstrip('/')}/" if where else ""
    config = Fields(f"{prefix}config.json", raw)
    model_type = config.text("model_type")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise ModelConfigError(
            f"{config.where}: model_type {model_type!r} is not known; known: {', '.join(sorted(_FAMILIES))}"
        )
    return family(config, Fields(f"{prefix}generation_config.json", generation or {}))


def _llama(config: Fields, generation: Fields) -> ModelConfig:
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"{config.where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = config.raw.get("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ModelConfigError(
            f"{config.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and head_dim is missing"
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelConfigError(
            f"{config.where}: head_dim {head_dim} is odd; rotary positions need pairs"
        )
    _refuse_quantisation(config)
    return _model_config(
        config, generation, num_kv_heads=num_kv_heads, head_dim=head_dim, context_tokens=None
    )


def _deepseek_v3(config: Fields, generation: Fields) -> ModelConfig:
    deepseek = read_deepseek(config)
    return _model_config(
        config,
        generation,
        num_kv_heads=config.integer("num_attention_heads"),
        head_dim=deepseek.rope_dim,
        context_tokens=4096,
        deepseek=deepseek,
    )


def _model_config(
    config: Fields,
    generation: Fields,
    *,
    num_kv_heads: int,
    head_dim: int,
    context_tokens: int | None,
    deepseek: DeepseekConfig | None = None,
) -> ModelConfig:
    """What all families have; `context_tokens` is a family's default."""
    model_type = config.text("model_type")
    hidden_act = config.text("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ModelConfigError(
            f"{config.where}: hidden_act {hidden_act!r} is not known to {model_type}; known: silu"
        )
    vocab_size = config.integer("vocab_size")
    eos = generation.token_ids("eos_token_id", vocab_size)
    if eos is None:
        eos = config.token_ids("eos_token_id", vocab_size) or ()
    return ModelConfig(
        model_type=model_type,
        architectures=_architectures(config),
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        hidden_act="silu",
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        sliding_window=_optional(config, "sliding_window"),
        rope=_rope(config, head_dim),
        context_tokens=config.integer("max_position_embeddings", context_tokens),
        dtype=_dtype(config),
        bos_token_id=_one_id(config, "bos_token_id", vocab_size),
        pad_token_id=_one_id(config, "pad_token_id", vocab_size),
        eos_token_ids=eos,
        generation=_generation(generation),
        deepseek=deepseek,
        raw=config.raw,
    )


# One reader per model_type.
_FAMILIES: dict[str, Callable[[Fields, Fields], ModelConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "llama": _llama,
}

# What each rope type must bring; "factor" and the like are then known to be there.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "longrope": ("short_factor", "long_factor"),
}


def _rope(config: Fields, dim: int) -> RopeConfig:
    """Rope from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    new, old = config.table("rope_parameters"), config.table("rope_scaling")
    key = "rope_parameters" if new is not None else "rope_scaling"
    raw = dict(new if new is not None else old or {})
    rope = Fields(f"{config.where}: {key}", raw)
    if raw and all(isinstance(value, dict) for value in raw.values()):
        raise ModelConfigError(
            f"{rope.where}: one set for all layers is expected, found {sorted(raw)}"
        )
    raw.setdefault("rope_type", raw.pop("type", None) or "default")
    rope_type = rope.text("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ModelConfigError(
            f"{rope.where}: rope_type {rope_type!r} is not known; known: {', '.join(ROPE_TYPES)}"
        )
    for parameter in ROPE_TYPES[rope_type]:
        if parameter.endswith("_factor") and rope_type == "longrope":
            _check_factors(rope, parameter, dim // 2)
        elif parameter == "original_max_position_embeddings":
            rope.integer(parameter)
        else:
            rope.number(parameter)
    theta = config.number("rope_theta", 10_000.0)
    if "rope_theta" in raw:
        inner = rope.number("rope_theta")
        if config.raw.get("rope_theta") is not None and inner != theta:
            raise ModelConfigError(
                f"{config.where}: rope_theta is {theta:g}, but {inner:g} inside {key}"
            )
        theta = inner
    if rope_type == "llama3" and rope.number("low_freq_factor") >= rope.number("high_freq_factor"):
        raise rope.fail("low_freq_factor", "less than high_freq_factor")
    rotated = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ModelConfigError(
            f"{config.where}: partial_rotary_factor {rotated:g} is not supported; only 1 is"
        )
    return RopeConfig(rope_type=rope_type, theta=theta, raw=raw)


def _check_factors(rope: Fields, key: str, count: int) -> None:
    factors = rope.raw.get(key)
    numbers = cast("list[Any]", factors) if isinstance(factors, list) else []
    if not numbers or any(
        isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 < n < math.inf
        for n in numbers
    ):
        raise rope.fail(key, "a list of numbers above 0")
    if len(numbers) != count:
        raise ModelConfigError(
            f"{rope.where}: {key}: expected {count} numbers, one a frequency, found {len(numbers)}"
        )


def _refuse_quantisation(config: Fields) -> None:
    quantisation = config.table("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unnamed")
        raise ModelConfigError(
            f"{config.where}: quantization_config: method {method!r} is not supported for "
            f"{config.raw.get('model_type')}; use a checkpoint that is not quantised, or a GGUF file"
        )


def _architectures(config: Fields) -> tuple[str, ...]:
    names = config.raw.get("architectures") or []
    if not isinstance(names, list) or not all(
        isinstance(name, str) for name in cast("list[object]", names)
    ):
        raise config.fail("architectures", "a list of strings")
    return tuple(cast("list[str]", names))


def _dtype(config: Fields) -> str:
    key = "dtype" if config.raw.get("dtype") is not None else "torch_dtype"
    name = config.text(key, "float32")
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise config.fail(key, "float32, bfloat16, float16 or float64")
    return name


def _optional(fields: Fields, key: str) -> int | None:
    return None if fields.raw.get(key) is None else fields.integer(key)


def _one_id(fields: Fields, key: str, vocab_size: int) -> int | None:
    if fields.raw.get(key) == -1:  # written by old converters for "none"
        return None
    ids = fields.token_ids(key, vocab_size)
    return ids[0] if ids else None


def _generation(fields: Fields) -> GenerationDefaults:
    """Sampling defaults. `do_sample` is not asked: a request decides by its temperature, as with vLLM."""

    def optional(key: str, *, above: float = 0.0) -> float | None:
        return None if fields.raw.get(key) is None else fields.number(key, above=above)

    top_p = optional("top_p")
    if top_p is not None and top_p > 1.0:
        raise fields.fail("top_p", "a number above 0 and at most 1")
    return GenerationDefaults(
        temperature=optional("temperature", above=-math.ulp(0.0)),  # 0 is greedy
        top_p=top_p,
        top_k=None if fields.raw.get("top_k") is None else fields.integer("top_k", low=0),
        repetition_penalty=optional("repetition_penalty"),
    )

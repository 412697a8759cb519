"""Rotary frequencies: what the rope types of Hugging Face configurations make of the base.

The formulas are those of `transformers.modeling_rope_utils`, in float64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.models import UnsupportedModelError
from headrace.models.config import ModelConfig

Frequencies = NDArray[np.float64]


class UnsupportedRopeError(UnsupportedModelError):
    """A rope type whose frequencies change with the length of the sequence, or are not implemented."""


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq` in radians per position, `head_dim / 2` of them; `scale` multiplies sine and cosine."""

    inv_freq: NDArray[np.float32]
    scale: float = 1.0


def rope_of(config: ModelConfig) -> Rope:
    """Frequencies of `config`. Raises `UnsupportedRopeError`."""
    rope, dim = config.rope, config.head_dim
    base = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.rope_type:
        case "default":
            return Rope(base.astype(np.float32))
        case "linear":
            return Rope((base / rope.fields.number("factor")).astype(np.float32))
        case "llama3":
            return Rope(_llama3(base, config).astype(np.float32))
        case "yarn":
            return _yarn(base, config)
        case "longrope":
            return _longrope(base, config)
        case other:
            raise UnsupportedRopeError(f"rope_type {other!r} is not supported by this model family")


def _llama3(base: Frequencies, config: ModelConfig) -> Frequencies:
    """Slow frequencies are divided by `factor`, fast ones stay, those between are blended."""
    fields = config.rope.fields
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    turns = fields.integer("original_max_position_embeddings") * base / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * base / factor + keep * base


def _yarn(base: Frequencies, config: ModelConfig) -> Rope:
    """As llama3, with the blend linear in the index of the pair, and an attention factor."""
    fields, dim = config.rope.fields, config.head_dim
    factor = fields.number("factor")
    original = fields.integer("original_max_position_embeddings", config.context_tokens)

    def pair_with(turns: float) -> float:
        """Index of the pair that turns this often within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope.theta))

    first = pair_with(fields.number("beta_fast", 32.0))
    last = pair_with(fields.number("beta_slow", 1.0))
    if fields.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    slowed = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    inv_freq = slowed * base / factor + (1 - slowed) * base

    if fields.raw.get("attention_factor") is not None:
        scale = fields.number("attention_factor")
    elif fields.raw.get("mscale") and fields.raw.get("mscale_all_dim"):
        above, below = fields.number("mscale"), fields.number("mscale_all_dim")
        scale = _temperature(factor, above) / _temperature(factor, below)
    else:
        scale = _temperature(factor, 1.0)
    return Rope(inv_freq.astype(np.float32), scale)


def _longrope(base: Frequencies, config: ModelConfig) -> Rope:
    """Each frequency is divided by a factor of its own: a short one up to the original context, a long one past it.

    Where both are one, or no sequence can pass the original context, they do not depend on the length.
    """
    fields, context = config.rope.fields, config.context_tokens
    short, long = fields.raw["short_factor"], fields.raw["long_factor"]
    key = "original_max_position_embeddings"
    original = fields.integer(key, config.fields.integer(key, context))
    if short != long and original < context:
        raise UnsupportedRopeError(
            f"longrope with another long_factor than short_factor past {key} {original} changes with the length of "
            f"the sequence, which is not supported; max_position_embeddings is {context}"
        )
    factor = fields.number("factor", context / original)
    if fields.raw.get("attention_factor") is not None:
        scale = fields.number("attention_factor")
    elif factor > 1 and original > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    else:
        scale = 1.0
    return Rope((base / np.array(short, np.float64)).astype(np.float32), scale)


def attention_scale(config: ModelConfig, dim: int) -> float:
    """What the scores of queries and keys of `dim` elements are multiplied by in DeepSeek models.

    Rope types that stretch the context may ask for sharper scores with `mscale_all_dim`.
    """
    rope, scale = config.rope, dim**-0.5
    if rope.rope_type == "default" or not rope.raw.get("mscale_all_dim"):
        return scale
    factor = rope.fields.number("factor")
    return scale * _temperature(factor, rope.fields.number("mscale_all_dim")) ** 2


def _temperature(factor: float, scale: float) -> float:
    """Of attention over a context that was stretched by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

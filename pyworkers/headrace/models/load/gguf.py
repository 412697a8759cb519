"""A GGUF file as a `Checkpoint`: its metadata as a configuration, its tensors under Hugging Face names.

llama.cpp stores the query and key rows of llama interleaved for its rope; here they are put back into the
order that Hugging Face uses, so a family sees no difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from headrace.models.config import ModelConfig, parse_config
from headrace.models.load import doc
from headrace.models.load.checkpoint import Checkpoint, TensorInfo
from headrace.models.load.gguf_file import GgufError, GgufFile
from headrace.models.load.safetensors_file import dtype_named
from headrace.models.load.tokenizer import gguf_model_files

if TYPE_CHECKING:
    from headrace_kernels.ops import HostArray

__all__ = ["GgufCheckpoint", "GgufError"]

T = TypeVar("T")

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # llama 3's frequency factors; not a weight

# Stored types that are kept; everything else is dequantised to float32.
_KEPT = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}


class GgufCheckpoint(Checkpoint):
    """One GGUF file. Quantised tensors are dequantised to float32 each time they are asked for."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Open and check `path`; no weight is read. Raises `ModelFileError`."""
        self._file = GgufFile(path)
        super().__init__(name or path.stem, path, gguf_config(self._file))
        self._stored: dict[str, str] = {}  # Hugging Face name -> GGUF name
        self._infos: dict[str, TensorInfo] = {}
        for stored, entry in self._file.entries.items():
            if stored == ROPE_FACTORS:
                continue
            hf_name = _hf_name(path, stored)
            self._stored[hf_name] = stored
            self._infos[hf_name] = TensorInfo(
                path.name, _KEPT.get(entry.kind, "float32"), entry.shape, entry.nbytes
            )

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @cached_property
    def _model_files(self) -> doc.ModelFiles:
        return gguf_model_files(self._file)

    def model_files(self) -> doc.ModelFiles:
        return self._model_files

    def float32(self, name: str) -> NDArray[np.float32]:
        """The tensor of this Hugging Face name, dequantised."""
        return self._unpermute(name, self._file.float32(self._stored[name]))

    def _load(self, name: str) -> HostArray:
        stored = self._stored[name]
        kept = _KEPT.get(self._file.entries[stored].kind)
        if kept is None:
            return self.float32(name)
        half = self._file.raw(stored).view(dtype_named(kept)).reshape(self._infos[name].shape)
        return self._unpermute(name, half)

    def sample(self, name: str) -> bytes:
        return self._file.sample(self._stored[name])

    def _unpermute(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of q and k from llama.cpp's pairs (2i, 2i+1) to Hugging Face's halves (i, i + d/2)."""
        if ".q_proj." in name:
            heads = self.config.num_heads
        elif ".k_proj." in name:
            heads = self.config.num_kv_heads
        else:
            return rows
        if rows.shape[0] % (2 * heads):
            return rows  # of a wrong shape, which `check` reports
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The metadata of a llama GGUF as the config.json it came from."""
    architecture = file.require("general.architecture", str)
    if architecture != "llama":
        raise GgufError(
            f"{file.path}: general.architecture {architecture!r} is not known; known: llama"
        )
    if file.get("split.count", int) not in (None, 0, 1):
        raise GgufError(
            f"{file.path}: split.count: one part of several; join them with gguf-split --merge"
        )
    if file.get("llama.expert_count", int):
        raise GgufError(f"{file.path}: llama.expert_count: experts are not supported for llama")
    if "token_embd.weight" not in file.entries:
        raise GgufError(f"{file.path}: tensor 'token_embd.weight' is missing")
    heads = file.require("llama.attention.head_count", int)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.entries["token_embd.weight"].shape[0],
        "hidden_size": file.require("llama.embedding_length", int),
        "intermediate_size": file.require("llama.feed_forward_length", int),
        "num_hidden_layers": file.require("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _or(file.get("llama.attention.head_count_kv", int), heads),
        "head_dim": _head_dim(file),
        "max_position_embeddings": file.require("llama.context_length", int),
        "rms_norm_eps": _shortest(file.require("llama.attention.layer_norm_rms_epsilon", float)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.entries,
        "mlp_bias": "blk.0.ffn_up.bias" in file.entries,
        "tie_word_embeddings": "output.weight" not in file.entries,
        "dtype": "float32",
        "rope_parameters": _rope(file),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_ids(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
    }
    return parse_config(raw, where=str(file.path))


def _head_dim(file: GgufFile) -> int | None:
    key_length = file.get("llama.attention.key_length", int)
    value_length = file.get("llama.attention.value_length", int)
    rotated = file.get("llama.rope.dimension_count", int)
    if key_length is not None and value_length is not None and key_length != value_length:
        raise GgufError(
            f"{file.path}: attention.key_length {key_length} is not value_length {value_length}"
        )
    if key_length is not None and rotated is not None and rotated != key_length:
        raise GgufError(
            f"{file.path}: rope.dimension_count {rotated} of {key_length} is not supported"
        )
    return rotated if key_length is None else key_length


def _eos_ids(file: GgufFile) -> list[int]:
    """End of sequence, of turn and of message: llama.cpp stops at each of them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in keys]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _rope(file: GgufFile) -> dict[str, Any]:
    theta = _shortest(_or(file.get("llama.rope.freq_base", float), 10_000.0))
    kind = _or(file.get("llama.rope.scaling.type", str), "none")
    if ROPE_FACTORS in file.entries:
        return {"rope_theta": theta} | _llama3_rope(file, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": file.require("llama.rope.scaling.factor", float),
    }
    original = file.get("llama.rope.scaling.original_context_length", int)
    return rope if original is None else rope | {"original_max_position_embeddings": original}


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """The parameters behind `rope_freqs.weight`: converters store only the factor of each frequency.

    Llama 3.1 and 3.2 differ in `factor` alone, which is the largest of the factors, so computing the
    others from it and comparing tells whether the file is one of these.
    """
    factors = file.float32(ROPE_FACTORS).ravel()
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max(initial=0.0))
    dim = 2 * len(factors)
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / max(factor, 1.0) + smooth)
    if factor < 1.0 or not np.allclose(factors, expected, rtol=1e-3):
        raise GgufError(
            f"{file.path}: {ROPE_FACTORS}: the factors are not those of Llama 3; not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _hf_name(path: Path, stored: str) -> str:
    layer = _LAYER_NAME.fullmatch(stored)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    top = _TOP_NAME.fullmatch(stored)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    raise GgufError(f"{path}: tensor {stored!r} is not known to llama")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _shortest(value: float) -> float:
    """The number a person wrote, from the float32 that GGUF keeps of it: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))

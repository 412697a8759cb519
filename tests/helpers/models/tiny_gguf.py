"""The tiny llama as a GGUF file, written by the gguf package the way llama.cpp's converter does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from headrace.models.load.checkpoint import SafetensorsCheckpoint
from helpers.models.tiny_model import SPECIALS, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", hf_name)
    if layer:
        return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = hf_name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}"


def permute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """The order of query and key rows in llama.cpp."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiny_gguf(
    path: Path,
    source: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    leave_out: str = "",
    extra: dict[str, NDArray[np.float32]] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint in `source` to `path`, matrices as `kind`; keys in `leave_out` are not written."""
    checkpoint = SafetensorsCheckpoint(source)
    config = checkpoint.config
    tokenizer = tiny_tokenizer()
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    values: dict[str, Any] = {
        "llama.context_length": config.context_tokens,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    } | (metadata or {})
    values.pop(leave_out, None)
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture", "llama")))
    for key, value in values.items():
        _add(writer, key, value)
    for name in checkpoint.names():
        rows = checkpoint.tensor(name)
        if ".q_proj." in name:
            rows = permute(rows, config.num_heads)
        elif ".k_proj." in name:
            rows = permute(rows, config.num_kv_heads)
        stored = kind if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
        if name != leave_out:
            data = gguf.quants.quantize(rows, stored)
            writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name, rows in (extra or {}).items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

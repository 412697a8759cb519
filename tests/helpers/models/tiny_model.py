"""A tiny random llama checkpoint in Hugging Face form: same seed, same bytes, written in milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.models.load.safetensors_file import write_safetensors

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in SmolLM2
WORDS = (
    "the",
    "and",
    "ing",
    "Ġthe",
    "Ġand",
    "Ġa",
    "Ġof",
    "Ġto",
    "Ġin",
    "er",
    "on",
    "Ġuser",
    "Ġyou",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)


def tiny_llama(path: Path, seed: int = 0, **config: Any) -> Path:
    """Write a llama of about 0.1 M parameters to `path` and return it. `config` overrides config.json.

    It answers with random tokens, greedy ones being repeatable; the tokenizer is byte-level, so any text
    goes in and out.
    """
    tokenizer = tiny_tokenizer()
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer["model"]["vocab"]),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    } | config
    write_json_files(path, raw)
    shapes = llama_shapes(raw)
    write_safetensors(path / "model.safetensors", shapes, _random(shapes, seed))
    return path


def write_json_files(path: Path, raw: Mapping[str, Any]) -> None:
    """Make the directory, with its config.json and the tokenizer that all tiny models share."""
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", raw)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    _write_json(path / "tokenizer.json", tiny_tokenizer())
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def llama_shapes(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Hugging Face llama with this config.json."""
    hidden, ffn, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    head_dim = raw.get("head_dim") or hidden // raw["num_attention_heads"]
    q, kv = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(raw["num_hidden_layers"]):
        rows = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in rows.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tiny_mtp_head(
    path: Path,
    model: Path,
    *,
    ffn: int,
    hidden_size: int | None = None,
    draft_ids: Sequence[int] | None = None,
    choices: Mapping[str, str] | None = None,
    drop: str = "",
    integer: str = "",
) -> Path:
    """Write a head with random weights for the llama in `model` to `path`, in float16, and return it.

    `hidden_size` is that of another model; the tensor `drop` is left out, `integer` is stored as integers.
    """
    raw = json.loads((model / "config.json").read_bytes())
    raw |= {
        "num_hidden_layers": 1,
        "intermediate_size": ffn,
        "hidden_size": hidden_size or raw["hidden_size"],
    }
    hidden = int(raw["hidden_size"])
    layer = "model.layers.0."
    shapes = {
        name.removeprefix(layer): shape
        for name, shape in llama_shapes(raw).items()
        if name.startswith(layer)
    }
    shapes |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    tensors: dict[str, NDArray[Any]] = {
        name: tensor.astype(np.int32 if name == integer else np.float16)
        for name, tensor in _random(shapes, seed=9)
        if name != drop
    }
    if draft_ids is not None:
        tensors["draft_token_ids"] = np.array(draft_ids, np.int32)
    noted = {"mtp_hidden_state": "raw", "mtp_chain_hidden_state": "normed"} | dict(choices or {})
    save_file(tensors, path, metadata=noted)
    return path


def tiny_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: the specials, 256 bytes and a few merged words."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *_byte_letters()))}
    merges: list[list[str]] = []
    for word in WORDS:
        left = word[0]
        for letter in word[1:]:
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append([left, letter])
            left += letter
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in SPECIALS
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _byte_letters() -> list[str]:
    """The printable letter that GPT-2 writes for each byte, in byte order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]


def _random(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Scaled so that activations neither vanish nor explode, and greedy text does not repeat at once."""
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        else:
            yield name, (random.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

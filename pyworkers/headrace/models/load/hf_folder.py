"""Write the files of a Hugging Face directory beside its weights, so that transformers reads it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.models.config import GenerationDefaults, ModelConfig
from headrace.models.load.doc import ModelFiles

__all__ = ["write_texts"]


def write_texts(
    out: Path,
    raw: Mapping[str, Any],
    config: ModelConfig,
    generation: GenerationDefaults,
    files: ModelFiles,
) -> None:
    """Write config.json (`raw`), generation_config.json, tokenizer.json and tokenizer_config.json into `out`.

    `config` gives the special ids and the context length.
    """
    _write_json(out / "config.json", raw)
    sampling = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "repetition_penalty": generation.repetition_penalty,
    }
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids),
            "pad_token_id": config.pad_token_id,
            "do_sample": bool(generation.temperature),
        }
        | {key: value for key, value in sampling.items() if value is not None},
    )
    (out / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    specials = {
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "pad_token": files.pad_token,
        "unk_token": files.unk_token,
        "chat_template": files.chat_template,
    }
    _write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_tokens}
        | {key: value for key, value in specials.items() if value is not None},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")

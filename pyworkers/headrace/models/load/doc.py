"""What the router needs to know of a model: one JSON document, and digests that tell two models apart.

The router keeps no model files. It asks a worker once for this document and then tokenises, renders the
chat template and detokenises from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from headrace.models.config import ModelConfig, ModelFileError, read_json_object

__all__ = [
    "ModelDocError",
    "ModelFiles",
    "ModelFingerprints",
    "fingerprints",
    "model_document",
    "read_model_files",
    "weights_fingerprint",
]

MAX_SAMPLED_TENSORS = (
    512  # bounds the page reads of a fingerprint on checkpoints of many thousand tensors
)


class ModelDocError(ModelFileError):
    """tokenizer.json, tokenizer_config.json or the chat template is missing or broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Tokenizer and chat template as found, before they become a document."""

    tokenizer: str  # tokenizer.json as text
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


@dataclass(frozen=True, slots=True)
class ModelFingerprints:
    """16 hex digits each."""

    weights: str
    tokenizer: str
    chat_template: str


def read_model_files(directory: Path) -> ModelFiles:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face directory."""
    path = directory / "tokenizer.json"
    tokenizer = _read_text(path)
    try:
        is_tokenizer = isinstance(json.loads(tokenizer), dict)
    except (ValueError, RecursionError) as error:
        raise ModelDocError(f"{path}: not valid JSON: {error}") from error
    if not is_tokenizer:
        raise ModelDocError(f"{path}: expected a JSON object")
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    return ModelFiles(
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, config_path, config),
        bos_token=_special(config_path, config, "bos_token"),
        eos_token=_special(config_path, config, "eos_token"),
        pad_token=_special(config_path, config, "pad_token"),
        unk_token=_special(config_path, config, "unk_token"),
    )


def model_document(files: ModelFiles, config: ModelConfig) -> bytes:
    """The document as UTF-8 JSON. Equal inputs give equal bytes."""
    document = {**_without_template(files, config), "chat_template": files.chat_template}
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _without_template(files: ModelFiles, config: ModelConfig) -> dict[str, Any]:
    generation = asdict(config.generation)
    return {
        "tokenizer": files.tokenizer,
        "eos_token_ids": _eos_ids(files, config),
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "pad_token": files.pad_token,
        "unk_token": files.unk_token,
        "context_tokens": config.context_tokens,
        "vocab_size": config.vocab_size,
        "generation": {key: value for key, value in generation.items() if value is not None},
    }


def fingerprints(files: ModelFiles, config: ModelConfig, weights: str) -> ModelFingerprints:
    """Digests of what the router keeps, beside that of the weights.

    The router keeps a document by the digests of tokenizer and template, so the two cover all of it: models
    that share tokenizer.json but not the context length or the generation defaults differ in `tokenizer`.
    """
    rest = json.dumps(_without_template(files, config), sort_keys=True)
    return ModelFingerprints(
        weights=weights,
        tokenizer=_digest(rest.encode()),
        chat_template=_digest((files.chat_template or "").encode()),
    )


def weights_fingerprint(
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    sample: Callable[[str], bytes],
) -> str:
    """Digest of the configuration, of all names, dtypes and shapes, and of a sample of the contents.

    It tells fine-tunes of one model apart and costs milliseconds; it is no proof against an attacker.
    How tensors are spread over shards does not change it.
    """
    stable = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }
    names = sorted(tensors)
    step = max(1, -(-len(names) // MAX_SAMPLED_TENSORS))
    return _digest(
        json.dumps(stable, sort_keys=True, default=str).encode(),
        json.dumps([(name, *tensors[name]) for name in names]).encode(),
        *(sample(name) for name in names[::step]),
    )


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _eos_ids(files: ModelFiles, config: ModelConfig) -> list[int]:
    """The ids that end an answer; where no config names any, that of the tokenizer's own eos token."""
    if config.eos_token_ids or files.eos_token is None:
        return list(config.eos_token_ids)
    tokenizer = json.loads(files.tokenizer)
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == files.eos_token:
            return [int(token["id"])]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and files.eos_token in vocab:
        return [int(cast("dict[str, Any]", vocab)[files.eos_token])]
    return []


def _chat_template(directory: Path, config_path: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja where that exists, else from tokenizer_config.json: a string, or a list of
    named templates of which `default` is taken (or the only one)."""
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return _read_text(separate)
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named: dict[str, str] = {}
    for item in cast("list[Any]", template) if isinstance(template, list) else [None]:
        entry = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        name, text = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelDocError(
                f"{config_path}: chat_template: expected a string or a list of {{name, template}}"
            )
        named[name] = text
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    raise ModelDocError(
        f"{config_path}: chat_template: none of {', '.join(sorted(named)) or 'an empty list'} is named 'default'"
    )


def _special(path: Path, config: Mapping[str, Any], key: str) -> str | None:
    """A special token: a string, or an AddedToken object with its `content`."""
    value = config.get(key)
    content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    if content is None and not isinstance(value, dict):
        return None
    if not isinstance(content, str):
        raise ModelDocError(
            f"{path}: {key}: expected a string or an object with 'content', found {value!r}"
        )
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelDocError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelDocError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error

"""The head's file: safetensors, fp16, named as a Llama decoder layer and the head's own; and where it is from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.safetensors_file import SafetensorsError, SafetensorsFile
from headrace.models.rope import rope_of
from headrace.mtp_training.module import HeadModule, HeadShape
from headrace_kernels.upload import tensor_of

MAX_FILE_BYTES = 8_000_000


class HeadFileError(ValueError):
    """The file is no head for this model; the text says file, key, expected and found."""


def save_head(
    path: Path,
    head: HeadModule,
    draft_token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
    metadata: dict[str, str],
) -> None:
    """Raises `HeadFileError` where it would be larger than a repository should hold."""
    tensors = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in head.state_dict().items()
    }
    infinite = [name for name, value in tensors.items() if not value.isfinite().all()]
    if infinite:
        raise HeadFileError(f"{path}: {infinite[0]}: a value is not finite in fp16")
    tensors["draft_token_ids"] = torch.from_numpy(draft_token_ids)
    data = _ordered(save(tensors, metadata={"format": "pt", **metadata}))
    if len(data) > MAX_FILE_BYTES:
        raise HeadFileError(
            f"{path}: would be {len(data)} bytes, the limit is {MAX_FILE_BYTES}: use fewer neurons or draft tokens"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def _ordered(data: bytes) -> bytes:
    """The same file with its metadata in order, so that equal heads are equal bytes: `save` shuffles it."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text + data[end:]


def read_head(
    path: Path, checkpoint: Checkpoint
) -> tuple[HeadModule, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """The head in `path` and the tokens that it drafts. Raises `HeadFileError` or `ModelFileError`."""
    file = SafetensorsFile(path)
    if "mlp.gate_proj.weight" not in file.entries:
        raise HeadFileError(f"{path}: mlp.gate_proj.weight: missing")
    config = checkpoint.config
    rope = rope_of(config)
    shape = HeadShape.of(config, file.entries["mlp.gate_proj.weight"].shape[0])
    head = HeadModule(shape, torch.from_numpy(rope.inv_freq.copy()), rope.scale)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    for name, wanted in expected.items():
        entry = file.entries.get(name)
        if entry is None or entry.dtype != "F16" or entry.shape != wanted:
            found = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise HeadFileError(f"{path}: {name}: expected F16 {list(wanted)}, found {found}")
    extra = sorted(set(file.entries) - set(expected) - {"draft_token_ids"})
    if extra:
        raise HeadFileError(f"{path}: {extra[0]}: not a key of a head")
    ids = file.entries.get("draft_token_ids")
    if ids is None or ids.dtype != "I32" or len(ids.shape) != 1 or not ids.shape[0]:
        raise HeadFileError(f"{path}: draft_token_ids: expected I32 [at least 1]")
    tokens = file.tensor("draft_token_ids").copy()
    if tokens.min() < 0 or tokens.max() >= config.vocab_size or (np.diff(tokens) <= 0).any():
        raise HeadFileError(
            f"{path}: draft_token_ids: expected ascending tokens below {config.vocab_size}"
        )
    head.load_state_dict({name: tensor_of(file.tensor(name)).float() for name in expected})
    return head, tokens


__all__ = ["MAX_FILE_BYTES", "HeadFileError", "SafetensorsError", "read_head", "save_head"]

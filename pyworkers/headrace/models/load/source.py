"""From what the user named to a `Checkpoint`: nothing (the default model), a directory, a GGUF file, a hub id.

Names of the default model and of its forms come before directories of that name, which are then named ./smollm2.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from headrace.extras import needs
from headrace.models.config import ModelFileError
from headrace.models.load.checkpoint import Checkpoint, SafetensorsCheckpoint
from headrace.models.load.default_model import DEFAULT_MODEL, NAMES, ensure_default_model
from headrace.models.r1_demo.smollm2_r1 import R1_FORMS, ensure_smollm2_r1

__all__ = ["SourceError", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


class SourceError(ModelFileError):
    """What was named is no model, or cannot be reached; the text says what to do."""


def resolve(model: str | None) -> Checkpoint:
    """Open the checkpoint of `model`; fetches it first where that is needed.

    Raises `ModelFileError`, and `MissingExtra` for a model of a hub without the hub's client.
    """
    if model is None or model in NAMES:
        return SafetensorsCheckpoint(ensure_default_model(), DEFAULT_MODEL.name)
    if model in R1_FORMS:
        return SafetensorsCheckpoint(ensure_smollm2_r1(model), model)
    path = Path(model).expanduser()
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return _open_file(path)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model)
    raise SourceError(
        f"{model}: no such directory or file, and not a hub id like org/name; "
        f"leave the model out for {DEFAULT_MODEL.name}"
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise SourceError(
            f"{path}: name the directory that holds it: the config and tokenizer are needed too"
        )
    # The gguf package is imported only where it is needed.
    from headrace.models.load.gguf import GgufCheckpoint

    return GgufCheckpoint(path)


def _from_hub(model: str) -> Checkpoint:
    """A snapshot of the hub: one that is cached and complete is used as it is, without asking the hub."""
    with needs("hub", f"{model}: there is no such directory, and to fetch it from a hub"):
        hub: Any = importlib.import_module("huggingface_hub")
    try:
        cached = hub.snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True)
        return SafetensorsCheckpoint(Path(cached), model)
    except (hub.errors.LocalEntryNotFoundError, ValueError):
        pass  # not there, not all of it, or no id that a hub could have, which the next call says
    try:
        fetched = hub.snapshot_download(model, allow_patterns=_HUB_FILES)
    except (
        Exception
    ) as error:  # requests, httpx, HTTP statuses: the hub's client has no common base
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise SourceError(
            f"{model}: not a directory here, and the hub did not give it: {reason}. Without network, name a "
            f"model directory or a GGUF file, or leave the model out for {DEFAULT_MODEL.name}"
        ) from error
    return SafetensorsCheckpoint(Path(fetched), model)

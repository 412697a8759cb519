"""A trained multi-token-prediction head in llama's form, as a file of its own, and the checkpoint's layer made of it.

The head is one llama decoder layer between `eh_proj`, which joins the embedding of a token with the hidden state of
the token before it, and a norm. It is read in the shapes of the model for which it was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.config import ModelConfig, ModelFileError
from headrace.models.load.safetensors_file import DTYPES, SafetensorsFile
from headrace.models.r1_demo.reexpress import (
    Form,
    Shapes,
    Weights,
    as_deepseek_layer,
    layer_shapes,
    llama_layer_shapes,
)

__all__ = ["MtpHead", "MtpHeadError"]

DRAFT_IDS = "draft_token_ids"  # of the head's own vocabulary, where it is smaller
CHOICES = ("mtp_hidden_state", "mtp_chain_hidden_state")  # of config.json, noted in the file


class MtpHeadError(ModelFileError):
    """The file is no head, or none of this model; the text names key, expected and found."""


class MtpHead:
    """A checked file. Tensors are read when they are asked for."""

    def __init__(self, path: Path, config: ModelConfig, form: Form) -> None:
        """Raises `ModelFileError`."""
        self.path = path
        self._file = SafetensorsFile(path)
        self._form = form
        self._layer = config.num_layers
        self._ffn = self._shape("mlp.gate_proj.weight")[0]
        if not 0 < self._ffn <= form.ffn:
            raise MtpHeadError(
                f"{path}: mlp.gate_proj.weight: expected 1 to {form.ffn} neurons, found {self._ffn}"
            )
        expected = dict(self._around().values()) | llama_layer_shapes(form, self._ffn)
        for name, shape in expected.items():
            self._check(name, shape)
        self._ids = self._draft_ids(config.vocab_size)

    def config(self) -> dict[str, Any]:
        """What config.json says of the head."""
        fields: dict[str, Any] = {"num_nextn_predict_layers": 1}
        for key in CHOICES:
            if key in self._file.metadata:
                choice = self._file.metadata[key]
                if choice not in ("normed", "raw"):
                    raise MtpHeadError(
                        f"{self.path}: {key}: expected normed or raw, found {choice!r}"
                    )
                fields[key] = choice
        if self._ids is not None:
            fields["mtp_draft_vocab_size"] = len(self._ids)
        return fields

    @property
    def integers(self) -> list[str]:
        """Names of the tensors that are not float32."""
        return [] if self._ids is None else [f"model.layers.{self._layer}.{DRAFT_IDS}"]

    def shapes(self) -> Shapes:
        """Names and shapes of the checkpoint's layer."""
        shapes = {name: shape for name, (_, shape) in self._around().items()}
        shapes |= layer_shapes(self._form, dense=False)
        if self._ids is not None:
            shapes[DRAFT_IDS] = self._ids.shape
        return {f"model.layers.{self._layer}.{name}": shape for name, shape in shapes.items()}

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The tensors of `shapes`."""
        prefix = f"model.layers.{self._layer}."
        for name, (llama_name, shape) in self._around().items():
            yield prefix + name, self._take(llama_name, shape)
        layer = as_deepseek_layer(self._take, self._form, seed=self._layer, ffn=self._ffn)
        for name, tensor in layer:
            yield prefix + name, tensor
        if self._ids is not None:
            yield prefix + DRAFT_IDS, self._ids

    def _around(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What is not of the decoder layer: its name in the checkpoint, its name here and its shape."""
        hidden = self._form.hidden
        return {
            "enorm.weight": ("enorm.weight", (hidden,)),
            "hnorm.weight": ("hnorm.weight", (hidden,)),
            "eh_proj.weight": ("eh_proj.weight", (hidden, 2 * hidden)),
            "shared_head.norm.weight": ("norm.weight", (hidden,)),
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file.entries:
            raise MtpHeadError(f"{self.path}: tensor {name!r} is missing")
        return self._file.entries[name].shape

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shape(name) != shape:
            raise MtpHeadError(
                f"{self.path}: {name}: expected shape {list(shape)}, found {list(self._shape(name))}; "
                "was the head trained for another model?"
            )
        dtype = DTYPES.get(self._file.entries[name].dtype, "an unknown type")
        if not dtype.startswith(("float", "bfloat")):
            raise MtpHeadError(f"{self.path}: {name}: expected floating point, found {dtype}")

    def _take(self, name: str, shape: tuple[int, ...]) -> Weights:
        assert self._shape(name) == shape, "shapes were checked at the beginning"
        return self._file.tensor(name).astype(np.float32, copy=False)

    def _draft_ids(self, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        if DRAFT_IDS not in self._file.entries:
            return None
        entry = self._file.entries[DRAFT_IDS]
        if entry.dtype != "I32" or len(entry.shape) != 1:
            raise MtpHeadError(
                f"{self.path}: {DRAFT_IDS}: expected a row of I32, found {entry.dtype} {list(entry.shape)}"
            )
        ids = self._file.tensor(DRAFT_IDS)
        if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
            raise MtpHeadError(
                f"{self.path}: {DRAFT_IDS}: expected token ids from 0 to {vocab_size - 1}"
            )
        return ids

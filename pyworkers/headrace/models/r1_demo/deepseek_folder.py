"""Write a llama checkpoint as a deepseek_v3 directory, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.load.checkpoint import Checkpoint, Progress
from headrace.models.load.hf_folder import write_texts
from headrace.models.load.safetensors_file import write_safetensors
from headrace.models.r1_demo.mtp_head import MtpHead
from headrace.models.r1_demo.reexpress import (
    Form,
    ReexpressError,
    Shapes,
    Weights,
    as_deepseek_config,
    form_of,
    model_shapes,
    model_tensors,
)

__all__ = ["Conversion", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """All that is needed to write; everything about the model has been checked but its weights' values."""

    checkpoint: Checkpoint
    form: Form
    head: MtpHead | None
    config: dict[str, Any]
    shapes: Shapes

    @property
    def nbytes(self) -> int:
        """Of the weights that will be written."""
        return sum(4 * math.prod(shape) for shape in self.shapes.values())

    def write(self, out: Path, progress: Progress) -> None:
        """Fill the empty directory `out`. Raises `ModelFileError` and `OSError`."""
        source = self.checkpoint
        write_texts(out, self.config, source.config, source.config.generation, source.model_files())
        write_safetensors(
            out / "model.safetensors",
            self.shapes,
            self._tensors(progress),
            integers=[] if self.head is None else self.head.integers,
        )

    def _tensors(self, progress: Progress) -> Iterator[tuple[str, Any]]:
        def take(name: str, shape: tuple[int, ...]) -> Weights:
            return self.checkpoint.tensor(name, shape).astype(np.float32, copy=False)

        done, total = 0, self.nbytes
        for name, tensor in model_tensors(take, self.checkpoint.config, self.form):
            yield name, tensor
            done += tensor.nbytes
            progress(done, total)
        if self.head is not None:
            yield from self.head.tensors()
        progress(total, total)


def plan(checkpoint: Checkpoint, *, paired: bool = False, head: Path | None = None) -> Conversion:
    """Check that `checkpoint` can be re-expressed, and that the file `head` is an MTP head for it.

    Raises `ModelFileError`.
    """
    config = checkpoint.config
    try:
        form = form_of(config, paired=paired)
        raw = as_deepseek_config(config, form)
    except ReexpressError as error:
        raise ReexpressError(f"{checkpoint.path}: {error}") from error
    shapes = model_shapes(config, form)
    found = None if head is None else MtpHead(head, config, form)
    if found is not None:
        raw |= found.config()
        shapes |= found.shapes()
    return Conversion(checkpoint=checkpoint, form=form, head=found, config=raw, shapes=shapes)

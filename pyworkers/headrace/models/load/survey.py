"""What a loader will read, found out before the first byte is: every name, shape and dtype is checked by then.

The loader itself runs, on tensors that have a shape and no data and for a backend that keeps nothing. So there is one
list of what a model consists of, and a checkpoint of hundreds of gigabytes is refused in seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.models.fp8 import Scaled
from headrace.models.load import doc
from headrace.models.load.checkpoint import HEAD, Checkpoint, CheckpointError, TensorInfo

__all__ = ["Survey", "SurveyBackend", "names_read", "survey"]

# What published checkpoints have beside what is read: layers that draft, and turns that follow from config.json.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OWN_DRAFTING = re.compile(r"(?:model\.)?mtp\.")
_TURNS = ".rotary_emb.inv_freq"


def survey(
    checkpoint: Checkpoint, load: Callable[[Checkpoint, SurveyBackend], object]
) -> list[str]:
    """The tensors that `load` reads, in its order.

    Raises `CheckpointError` for one that is missing, of another shape or of another kind of dtype, and for one that
    belongs to no part of the model.
    """
    asked = names_read(checkpoint, load)
    known = set(asked)
    extra = [name for name in checkpoint.infos if name not in known]
    extra = [name for name in extra if not _may_be_there(name, checkpoint)]
    if extra:
        info = checkpoint.infos[extra[0]]
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: {info.file}: {extra[0]!r} is no tensor of this model{more}: config.json or the "
            "weights are of another one"
        )
    return asked


def names_read(
    checkpoint: Checkpoint, load: Callable[[Checkpoint, SurveyBackend], object]
) -> list[str]:
    """The tensors that `load` reads whole, in its order; what it leaves out is not looked at."""
    surveyed = Survey(checkpoint)
    load(surveyed, SurveyBackend())
    return [name for name in surveyed.asked if surveyed.is_whole(name)]


def _may_be_there(name: str, checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    if match := _LAYER.match(name):
        return int(match[1]) >= config.num_layers or name.endswith(_TURNS)
    return bool(_OWN_DRAFTING.match(name)) or (name == HEAD and config.tie_word_embeddings)


class Survey(Checkpoint):
    """A checkpoint without data. Integers are read: they are few, and the loader looks at them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.name, checkpoint.path, checkpoint.config)
        self._of = checkpoint
        self.asked: dict[str, None] = {}  # an ordered set
        self._rows: Counter[str] = Counter()  # of tensors that are read in parts

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._of.infos

    def tensor(
        self,
        name: str,
        shape: Iterable[int] | None = None,
        *,
        rows: range | None = None,
    ) -> torch.Tensor:
        if not self._check(name, shape).dtype.startswith("float8"):
            return self._read(name, rows)
        scaled = self.scaled(name, shape, rows=rows)
        return torch.empty_like(scaled.weight, dtype=torch.float32)

    def _read(self, name: str, rows: range | None = None) -> torch.Tensor:
        if rows is not None:
            self._rows[name] += len(rows)
        return super()._read(name, rows)

    def is_whole(self, name: str) -> bool:
        """Whether all parts of an asked tensor were asked for: of stacked experts a rank reads some."""
        return name not in self._rows or self._rows[name] >= self.infos[name].shape[0]

    def _load(self, name: str) -> torch.Tensor:
        self.asked[name] = None
        info = self.infos[name]
        if info.dtype in ("int32", "int64"):
            return self._of.integers(name, info.shape)
        return torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")

    def sample(self, name: str) -> bytes:
        return self._of.sample(name)

    def model_files(self) -> doc.ModelFiles:
        return self._of.model_files()


class SurveyBackend:
    """Every backend's part in loading, and nothing comes of it."""

    def matrix(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> None:
        del parts, bias

    def vector(self, x: torch.Tensor) -> None:
        del x

    def table(self, x: torch.Tensor) -> None:
        del x

    def tied_head(self, table: None, embedding: torch.Tensor) -> None:
        del table, embedding

    def head_matrices(self, kv_b: torch.Tensor) -> None:
        del kv_b

    def fp8_matrix(self, parts: Sequence[Scaled], bias: torch.Tensor | None = None) -> None:
        del parts, bias

    def experts(
        self,
        gate: Any,
        bias: Any,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        routing: Any,
        *,
        shared: Any,
        dispatch: Any,
    ) -> None:
        del gate, bias, routing, shared, dispatch
        for halves in (gate_up, down):
            for expert in range(len(halves)):
                halves[expert]

    def fp8_experts(self, *args: Any, **others: Any) -> None:
        self.experts(*args, **others)

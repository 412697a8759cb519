"""What a loader will read, found out before the first byte is: every name, shape and dtype is checked by then.

The loader itself runs, on arrays that have a shape and one element in memory, and for a backend that keeps nothing. So
there is one list of what a model consists of, and a checkpoint of hundreds of gigabytes is refused in seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.models.fp8 import Scaled
from headrace.models.load import doc
from headrace.models.load.checkpoint import HEAD, Checkpoint, CheckpointError, TensorInfo
from headrace.models.load.safetensors_file import dtype_named

if TYPE_CHECKING:
    from headrace_kernels.ops import HostArray

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
    ) -> HostArray:
        if not self._check(name, shape).dtype.startswith("float8"):
            return self._read(name, rows)
        scaled = self.scaled(name, shape, rows=rows)
        return _blank(scaled.weight.shape, "float32")

    def stacked(self, parts: Sequence[HostArray]) -> HostArray:
        first = parts[0]
        return _blank((sum(map(len, parts)), *first.shape[1:]), first.dtype.name)

    def _read(self, name: str, rows: range | None = None) -> HostArray:
        if rows is not None:
            self._rows[name] += len(rows)
        return super()._read(name, rows)

    def is_whole(self, name: str) -> bool:
        """Whether all parts of an asked tensor were asked for: of stacked experts a rank reads some."""
        return name not in self._rows or self._rows[name] >= self.infos[name].shape[0]

    def _load(self, name: str) -> HostArray:
        self.asked[name] = None
        info = self.infos[name]
        if info.dtype in ("int32", "int64"):
            return self._of.integers(name, info.shape)
        return _blank(info.shape, info.dtype)

    def sample(self, name: str) -> bytes:
        return self._of.sample(name)

    def model_files(self) -> doc.ModelFiles:
        return self._of.model_files()


def _blank(shape: Sequence[int], dtype: str) -> HostArray:
    """Of this shape, and no larger than an element: all places are the same one."""
    return np.broadcast_to(np.zeros((), dtype_named(dtype)), shape)


class SurveyBackend:
    """Every backend's part in loading, and nothing comes of it."""

    def matrix(self, parts: Sequence[HostArray], bias: HostArray | None = None) -> None:
        del parts, bias

    def vector(self, x: HostArray) -> None:
        del x

    def table(self, x: HostArray) -> None:
        del x

    def tied_head(self, table: None, embedding: HostArray) -> None:
        del table, embedding

    def head_matrices(self, kv_b: HostArray) -> None:
        del kv_b

    def fp8_matrix(self, parts: Sequence[Scaled], bias: HostArray | None = None) -> None:
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

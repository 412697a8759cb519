"""Weights in a folder as the CPU kernels read them: packed once, then mapped by every worker of a machine.

weights.bin  matrices, tables and vectors in the order in which a loader asks for them, each from a multiple of 64 on
index.json   what each of them is

`PackingBackend` writes a folder while a model is loaded. `PackedBackend` gives what is in one, and asks a loader for
shapes alone. What a folder is of, its owner knows. Experts that move between ranks have no place here: whoever
overwrites one would first copy all of its layer.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace_kernels.native import NativeBackend, stored_array
from headrace_kernels.ops import Attention, HostArray, MlaAttention

FORMAT = 1  # raise it when images, or what is here, change
WEIGHTS, INDEX = "weights.bin", "index.json"
ALIGNMENT = 64


class PackedError(ValueError):
    """A folder does not hold what its loader asks for."""


class PackingBackend(NativeBackend):
    """Computes like any other, and writes down what it is given."""

    def __init__(self, attention: Attention | MlaAttention, *, dtype: str, folder: Path) -> None:
        super().__init__(attention, dtype=dtype)
        self._folder = folder
        self._out = (folder / WEIGHTS).open("wb")
        self._items: list[dict[str, Any]] = []

    def matrix(self, parts: Sequence[HostArray], bias: HostArray | None = None) -> _core.Weight:
        weight = super().matrix(parts, bias)  # a bias is a vector before it
        self._add(weight.image(), _of_matrix(parts))
        return weight

    def vector(self, x: HostArray) -> list[float]:
        values = super().vector(x)
        self._add(np.array(values, dtype=np.float32), {"vector": len(values)})
        return values

    def head_matrices(self, kv_b: HostArray) -> _core.HeadMatrices:
        matrices = super().head_matrices(kv_b)
        self._add(matrices.image(), _of_heads(self.latent_heads(kv_b)))
        return matrices

    def slots(
        self, gate_up: Sequence[HostArray], down: Sequence[HostArray], shape: tuple[int, int]
    ) -> _core.Slots:
        slots = super().slots(gate_up, down, shape)
        self._begin(_of_experts(shape, gate_up, down))
        for part in range(slots.parts):  # which are written before the next is copied
            self._write(slots.image(part))
        return slots

    def float_rows(self, x: HostArray) -> NDArray[np.float32]:
        rows = super().float_rows(x)
        self._add(rows, {"rows": list(rows.shape)})
        return rows

    def table(self, x: HostArray) -> _core.Table:
        rows, stored = stored_array(x)
        self._add(rows, {"table": list(x.shape), "stored": stored})
        return super().table(x)

    def finish(self) -> None:
        """All is written that will be."""
        self._out.close()
        index = {"format": FORMAT, "dtype": self.dtype_name, "items": self._items}
        (self._folder / INDEX).write_text(json.dumps(index))

    def _add(self, values: NDArray[Any], what: dict[str, Any]) -> None:
        self._begin(what)
        self._write(values)

    def _begin(self, what: dict[str, Any]) -> None:
        self._write(np.zeros(-self._out.tell() % ALIGNMENT, np.uint8))
        self._items.append({"start": self._out.tell(), **what})

    def _write(self, values: NDArray[Any]) -> None:
        try:
            self._out.write(np.ascontiguousarray(values).data)
        except (
            OSError
        ) as error:  # a checkpoint that is read meanwhile would take it for one of its own files
            raise PackedError(f"{self._folder / WEIGHTS}: {error.strerror or error}") from error


class PackedBackend(NativeBackend):
    """The model whose weights are in a folder. What loaders give it has to have the shapes of these, and no values."""

    def __init__(self, attention: Attention | MlaAttention, *, dtype: str, folder: Path) -> None:
        """Raises `PackedError`, and OSError where files are missing."""
        super().__init__(attention, dtype=dtype)
        self._folder = folder
        index: Any = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT or index["dtype"] != dtype:
            raise PackedError(f"{folder}: of format {index['format']} and {index['dtype']}")
        self._items: list[dict[str, Any]] = index["items"]
        self._next = 0
        with (folder / WEIGHTS).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.step = replace(self.step, mapped_bytes=len(self._map))

    def matrix(self, parts: Sequence[HostArray], bias: HostArray | None = None) -> _core.Weight:
        of_bias = None if bias is None else self.vector(bias)
        what = _of_matrix(parts)
        n, k = what["matrix"]
        start = self._start(what)
        return _core.Weight.mapped(self._map, start, n=n, k=k, dtype=self.dtype_name, bias=of_bias)

    def vector(self, x: HostArray) -> list[float]:
        start = self._start({"vector": len(x)})
        return np.frombuffer(self._map, np.float32, len(x), start).tolist()

    def head_matrices(self, kv_b: HostArray) -> _core.HeadMatrices:
        a = self.latent_heads(kv_b)
        return _core.HeadMatrices.mapped(
            self._map,
            self._start(_of_heads(a)),
            heads=a.heads,
            nope_dim=a.nope_dim,
            v_dim=a.v_dim,
            kv_lora_rank=a.kv_lora_rank,
            dtype=self.dtype_name,
        )

    def slots(
        self, gate_up: Sequence[HostArray], down: Sequence[HostArray], shape: tuple[int, int]
    ) -> _core.Slots:
        start = self._start(_of_experts(shape, gate_up, down))
        (count, hidden), width = shape, down[0].shape[1]
        return _core.Slots.mapped(
            self._map, start, count=count, hidden=hidden, width=width, dtype=self.dtype_name
        )

    def float_rows(self, x: HostArray) -> NDArray[np.float32]:
        start = self._start({"rows": list(x.shape)})
        return np.frombuffer(self._map, np.float32, x.size, start).reshape(x.shape)

    def table(self, x: HostArray) -> _core.Table:
        item = self._items[self._next] if self._next < len(self._items) else {}
        stored = item.get("stored")
        start = self._start({"table": list(x.shape), "stored": stored})
        return _core.Table.mapped(
            self._map, start, rows=x.shape[0], width=x.shape[1], stored=str(stored)
        )

    def _start(self, what: dict[str, Any]) -> int:
        """Where the next one lies, which is to be this."""
        found = self._items[self._next] if self._next < len(self._items) else {}
        start = found.get("start")
        if start is None or found != {"start": start, **what}:
            raise PackedError(f"{self._folder}: item {self._next} is {found}, expected {what}")
        self._next += 1
        return start


def _of_matrix(parts: Sequence[HostArray]) -> dict[str, Any]:
    return {"matrix": [sum(map(len, parts)), parts[0].shape[1]]}


def _of_heads(a: MlaAttention) -> dict[str, Any]:
    return {"heads": [a.heads, a.nope_dim, a.v_dim, a.kv_lora_rank]}


def _of_experts(
    shape: tuple[int, int], gate_up: Sequence[HostArray], down: Sequence[HostArray]
) -> dict[str, Any]:
    halves = [list(half[0].shape) for half in (gate_up, down)]
    return {"experts": [list(shape), *halves]}

"""One safetensors file: header checked before use, tensors as views of the mapped file; and a writer.

Format: u64 LE header length | JSON header {name: {dtype, shape, data_offsets}} | data. Reading needs no
more than the header, so a 4 GB shard opens in milliseconds. We parse it ourselves because the errors of a
broken file must say which key is wrong, and because the CLI reads shapes without importing torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from headrace.models.config import ModelFileError
from headrace.models.load.mapped import array_of, mapped

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "SafetensorsError", "SafetensorsFile", "TensorEntry", "write_safetensors"]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SAMPLE_BYTES = 64

# safetensors name -> torch name
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class SafetensorsError(ModelFileError):
    """The file is truncated, corrupt or not safetensors."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """A checked, mapped file. The mapping lives as long as this object or any tensor of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self.entries, self.metadata = _read_header(file, path, size)
                self._map = mapped(file)
        except OSError as error:
            raise SafetensorsError(f"{path}: cannot be read: {error.strerror or error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file, or a copy where the data is not aligned to its dtype. Whoever writes to it is killed."""
        import torch

        entry = self.entries[name]
        dtype = cast("torch.dtype", getattr(torch, DTYPES[entry.dtype]))
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        part = self._bytes[entry.start : entry.start + entry.nbytes]
        if entry.start % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).reshape(entry.shape)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(array_of(self._map))

    def sample(self, name: str) -> bytes:
        """The first and last bytes of the tensor."""
        entry = self.entries[name]
        end = entry.start + entry.nbytes
        head = min(entry.nbytes, SAMPLE_BYTES)
        return self._map[entry.start : entry.start + head] + self._map[end - head : end]


def _read_header(
    file: BinaryIO, path: Path, size: int
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors, and what else the writer noted; the format wants that to be strings."""
    if size < 8:
        raise SafetensorsError(
            f"{path}: truncated: {size} bytes, a safetensors file has at least 8"
        )
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise SafetensorsError(
            f"{path}: not safetensors: the header would be {length} bytes, the format's limit is "
            f"{MAX_HEADER_BYTES}"
        )
    if 8 + length > size:
        raise SafetensorsError(
            f"{path}: truncated: the header ends at byte {8 + length}, the file at {size}"
        )
    try:
        header: object = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path}: the header is not a JSON object")
    data_start = 8 + length
    fields = cast("dict[str, Any]", header)
    noted = fields.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, data_start, size) for name, value in fields.items()}
    _check_layout(path, entries, data_start, size)
    metadata = cast("dict[str, Any]", noted) if isinstance(noted, dict) else {}
    return entries, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} is there twice")
    return result


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    def fail(key: str, expected: str, found: object) -> SafetensorsError:
        return SafetensorsError(f"{path}: {name}: {key}: expected {expected}, found {found!r}")

    if not isinstance(value, dict):
        raise fail("entry", "an object", value)
    fields = cast("dict[str, Any]", value)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str):
        raise fail("dtype", "a string", dtype)
    if not isinstance(shape, list) or not all(_is_count(n) for n in cast("list[Any]", shape)):
        raise fail("shape", "a list of sizes", shape)
    if not isinstance(offsets, list) or len(cast("list[Any]", offsets)) != 2:
        raise fail("data_offsets", "two offsets", offsets)
    begin, end = cast("list[Any]", offsets)
    if not _is_count(begin) or not _is_count(end) or begin > end:
        raise fail("data_offsets", "begin <= end", offsets)
    if data_start + end > size:
        raise SafetensorsError(
            f"{path}: {name}: truncated: its data ends at byte {data_start + end}, the file at {size}"
        )
    dims = tuple(cast("list[int]", shape))
    item_bytes = _ITEM_BYTES.get(dtype)  # an unknown dtype is the checkpoint's error, if it is used
    if item_bytes is not None and math.prod(dims) * item_bytes != end - begin:
        raise fail(
            "data_offsets", f"{math.prod(dims) * item_bytes} bytes for {dtype} {shape}", end - begin
        )
    return TensorEntry(dtype, dims, data_start + begin, end - begin)


def _check_layout(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int
) -> None:
    """Tensors follow one another without overlap, hole or rest, as the format asks."""
    at, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start < at:
            raise SafetensorsError(f"{path}: {name}: overlaps {before}")
        if entry.start > at:
            raise SafetensorsError(
                f"{path}: {name}: {entry.start - at} bytes before it belong to no tensor"
            )
        at, before = entry.start + entry.nbytes, name
    if at != size:
        raise SafetensorsError(f"{path}: {size - at} bytes after the last tensor belong to none")


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float32] | NDArray[np.int32]]],
    *,
    integers: Collection[str] = (),
) -> None:
    """Write tensors one at a time: `tensors` yields them in the order of `shapes`, in float32, or in int32 where
    the name is one of `integers`.

    Only one tensor is in memory at a time, which `safetensors.save_file` does not offer.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        dtype = "I32" if name in integers else "F32"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert name == given and shape == tensor.shape
            assert tensor.dtype == (np.int32 if name in integers else np.float32)
            file.write(np.ascontiguousarray(tensor).data)

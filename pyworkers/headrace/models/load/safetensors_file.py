"""One safetensors file: header read by the library `safetensors`, tensors as views of the mapped file; and a writer.

The library's own tensors are not used: it copies what it reads, and a shard of 4 GB is to be mapped in milliseconds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from headrace.models.config import ModelFileError
from headrace.models.load.mapped import array_of, mapped

if TYPE_CHECKING:
    from headrace_kernels.ops import HostArray

__all__ = [
    "DTYPES",
    "SafetensorsError",
    "SafetensorsFile",
    "TensorEntry",
    "dtype_named",
    "write_safetensors",
]

SAMPLE_BYTES = 64

# safetensors name -> what numpy, ml_dtypes and torch call it
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
# Of every dtype that the library knows: it says what a tensor's dtype and shape are, not where the tensor lies.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def dtype_named(name: str) -> np.dtype[Any]:
    """One of the values of `DTYPES`."""
    return np.dtype(getattr(ml_dtypes, name, name))


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
                self.entries, self.metadata = _read_header(path, path.stat().st_size)
                self._map = mapped(file)
        except OSError as error:
            raise SafetensorsError(f"{path}: cannot be read: {error.strerror or error}") from error
        end = max((entry.start + entry.nbytes for entry in self.entries.values()), default=0)
        if end > len(self._map):
            raise SafetensorsError(f"{path}: it became shorter while it was opened")

    def tensor(self, name: str) -> HostArray:
        """A view of the file, or a copy where the data is not aligned to its dtype. Whoever writes to it is killed."""
        entry = self.entries[name]
        dtype = dtype_named(DTYPES[entry.dtype])
        if entry.nbytes == 0:
            return np.empty(entry.shape, dtype)
        part = self._bytes[entry.start : entry.start + entry.nbytes]
        if entry.start % dtype.itemsize:
            part = part.copy()
        return part.view(dtype).reshape(entry.shape)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return array_of(self._map)

    def sample(self, name: str) -> bytes:
        """The first and last bytes of the tensor."""
        entry = self.entries[name]
        end = entry.start + entry.nbytes
        head = min(entry.nbytes, SAMPLE_BYTES)
        return self._map[entry.start : entry.start + head] + self._map[end - head : end]


def _read_header(path: Path, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file of `size` bytes, and what else its writer noted.

    The library refuses headers of more than 100 MB, and tensors that overlap, leave holes or do not fill the file. So
    each begins where the one before ends, and the last one ends with the file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {
                name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()
            }
    except SafetensorError as error:
        raise SafetensorsError(f"{path}: not safetensors, or damaged: {error}") from error
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in found.items():
        if dtype not in _BITS:
            raise SafetensorsError(f"{path}: {name}: dtype {dtype!r} is not known")
        sizes[name] = math.prod(shape) * _BITS[dtype] // 8
    entries: dict[str, TensorEntry] = {}
    start = size - sum(sizes.values())
    for name, (dtype, shape) in found.items():
        entries[name] = TensorEntry(dtype, shape, start, sizes[name])
        start += sizes[name]
    return entries, metadata


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

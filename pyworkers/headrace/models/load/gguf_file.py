"""One GGUF file: header checked before use, tensors as views of the mapped file.

Format (little endian): "GGUF" | u32 version | u64 tensors | u64 keys | keys | tensor infos | data, aligned.
Parsed here because the reader of the `gguf` package takes four seconds for 49,000 tokens and accepts files
that end early; its table of block sizes and its dequantisers are used as they are.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from headrace.models.config import ModelFileError
from headrace.models.load.mapped import array_of, mapped

__all__ = ["GgufEntry", "GgufError", "GgufFile"]

T = TypeVar("T")

SAMPLE_BYTES = 64
MAX_ARRAY_DEPTH = 4
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_VERSIONS = (2, 3)


class GgufError(ModelFileError):
    """The file is truncated, corrupt, not GGUF, or of a kind that is not supported."""


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor. `shape` is in the order of Hugging Face and numpy; `start` counts from the file's beginning."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """A checked, mapped file: `metadata` as plain Python values, `entries` by GGUF name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if path.stat().st_size < 24:
                    raise GgufError(f"{path}: truncated: a GGUF file has at least 24 bytes")
                self._map = mapped(file)
        except OSError as error:
            raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._bytes = array_of(self._map)
        self.metadata, self.entries = _Reader(path, self._map).header()
        for kind in {entry.kind for entry in self.entries.values()}:
            self._check_kind(kind)

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value of type `kind`, or None where the key is missing."""
        value = self.metadata.get(key)
        if value is None:
            return None
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise GgufError(
                f"{self.path}: {key}: expected {kind.__name__}, found {str(value)[:60]}"
            )
        return cast(T, value)

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise GgufError(f"{self.path}: {key}: expected {kind.__name__}, the key is missing")
        return value

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, or None where the key is missing."""
        value = self.get(key, list)
        if value is not None and value and not isinstance(value[0], str):
            raise GgufError(f"{self.path}: {key}: expected an array of strings")
        return cast("list[str] | None", value)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, without a copy."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.start + entry.nbytes]

    def float32(self, name: str) -> NDArray[np.float32]:
        """The tensor, dequantised. A view of the file only where it is stored as float32."""
        entry = self.entries[name]
        if entry.kind == GGMLQuantizationType.F32:
            return self.raw(name).view(np.float32).reshape(entry.shape)
        per_block, block_bytes = GGML_QUANT_SIZES[entry.kind]
        row_bytes = entry.shape[-1] // per_block * block_bytes
        return _dequantise(self.raw(name).reshape(-1, row_bytes), entry.kind).reshape(entry.shape)

    def sample(self, name: str) -> bytes:
        """The first and last bytes of the tensor as it is stored."""
        data = self.raw(name)
        return data[:SAMPLE_BYTES].tobytes() + data[-SAMPLE_BYTES:].tobytes()

    def _check_kind(self, kind: GGMLQuantizationType) -> None:
        """Try the dequantiser on one block of zeros, so that loading cannot fail halfway."""
        try:
            _dequantise(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError as error:
            raise GgufError(
                f"{self.path}: tensors of type {kind.name} cannot be dequantised by the installed gguf package"
            ) from error


def _dequantise(data: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """`data` is of rows of whole blocks; short rows are slow, so pass the tensor's own."""
    if kind == GGMLQuantizationType.F16:
        return data.view(np.float16).astype(np.float32)
    if kind == GGMLQuantizationType.F32:
        return data.view(np.float32)
    # All-zero or odd scales make some formats divide by zero; the result is what ggml computes too.
    with np.errstate(all="ignore"):
        return cast("NDArray[np.float32]", dequantize(data, kind))


class _Reader:
    """A cursor over the header. Every length is compared with what is left before it is used."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, text: str) -> GgufError:
        return GgufError(f"{self.path}: {text}")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > len(self.data) - self.at:
            raise self.fail(
                f"truncated: {what} at byte {self.at} needs {nbytes} bytes, {len(self.data) - self.at} are left"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        length = cast(int, self.scalar("Q", what))
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: not UTF-8: {error.reason}") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth == MAX_ARRAY_DEPTH:
            raise self.fail(f"{what}: value type {kind} is not known")
        item, count = cast(int, self.scalar("I", what)), cast(int, self.scalar("Q", what))
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            self.need(count * struct.calcsize("<" + _SCALARS[item]), what)
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += struct.calcsize(code)
            return values
        self.need(8 * count, what)  # a string or an array takes 8 bytes at least
        return [self.value(item, what, depth + 1) for _ in range(count)]

    def header(self) -> tuple[dict[str, Any], dict[str, GgufEntry]]:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        self.at = 4
        version = cast(int, self.scalar("I", "version"))
        if version not in _VERSIONS:
            endian = "; it may be big-endian" if version & 0xFFFF == 0 else ""
            raise self.fail(f"GGUF version {version} is not supported, expected 2 or 3{endian}")
        num_tensors = cast(int, self.scalar("Q", "tensor count"))
        num_keys = cast(int, self.scalar("Q", "key count"))
        # 8 for the name's length, 4 for the type, a byte.
        self.need(num_keys * 13, f"{num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a key's name")
            if key in metadata:
                raise self.fail(f"key {key!r} is there twice")
            metadata[key] = self.value(cast(int, self.scalar("I", key)), key)
        self.need(num_tensors * 24, f"{num_tensors} tensor infos")
        infos = [self.info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment: expected a power of two, found {alignment!r}")
        start = -(-self.at // alignment) * alignment
        return metadata, self.place(infos, start, alignment)

    def info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self.string("a tensor's name")
        num_dims = cast(int, self.scalar("I", name))
        if not 1 <= num_dims <= 8:
            raise self.fail(f"{name}: expected 1 to 8 dimensions, found {num_dims}")
        shape = tuple(cast(int, self.scalar("Q", name)) for _ in range(num_dims))[::-1]
        kind = cast(int, self.scalar("I", name))
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self.fail(f"{name}: tensor type {kind} is not known") from error
        return name, quantisation, shape, cast(int, self.scalar("Q", name))

    def place(
        self,
        infos: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]],
        data_start: int,
        alignment: int,
    ) -> dict[str, GgufEntry]:
        """Turn offsets into places in the file and check that these are apart and inside."""
        entries: dict[str, GgufEntry] = {}
        for name, kind, shape, offset in infos:
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % per_block:
                raise self.fail(
                    f"{name}: rows of {shape[-1]} are no multiple of {kind.name}'s {per_block}"
                )
            nbytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                raise self.fail(f"{name}: offset {offset} is not aligned to {alignment}")
            if data_start + offset + nbytes > len(self.data):
                raise self.fail(
                    f"{name}: truncated: its data ends at byte {data_start + offset + nbytes}, "
                    f"the file at {len(self.data)}"
                )
            if name in entries:
                raise self.fail(f"tensor {name!r} is there twice")
            entries[name] = GgufEntry(kind, shape, data_start + offset, nbytes)
        _check_apart(self, entries)
        return entries


def _check_apart(reader: _Reader, entries: Mapping[str, GgufEntry]) -> None:
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise reader.fail(f"{name}: overlaps {before}")
        end, before = entry.start + entry.nbytes, name

"""A model on disk: `Checkpoint` is what every family loads from, `SafetensorsCheckpoint` the usual kind.

A checkpoint gives names, shapes and dtypes without reading a weight, and each tensor on demand, mapped
from the file, as an array of numpy.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.host_memory import available_bytes
from headrace.models.config import ModelConfig, ModelFileError, read_config, read_json_object
from headrace.models.load import doc
from headrace.models.load.read_ahead import MOST_AHEAD_BYTES, MOST_READERS, Place, ReadAhead, cores
from headrace.models.load.safetensors_file import DTYPES, SafetensorsFile

if TYPE_CHECKING:
    from headrace.models.fp8 import Scaled
    from headrace_kernels.ops import HostArray

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Progress",
    "SafetensorsCheckpoint",
    "TensorInfo",
]

# Called with the bytes that were read so far and with all that there are.
Progress = Callable[[int, int], None]

READ_AHEAD_FROM = 1 << 30  # bytes; a guess

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointError(ModelFileError):
    """The weights are incomplete, broken or do not fit the configuration."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read. `dtype` is the name of the dtype that `tensor` returns, or FP8."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # in the file


class Checkpoint(ABC):
    """Weights, configuration, tokenizer and chat template of one model, under Hugging Face names.

    `tensor` returns views of the mapped file where it can: read them, do not write to them. With tied
    embeddings the embedding and the head are one tensor and either name finds it.
    """

    def __init__(self, name: str, path: Path, config: ModelConfig) -> None:
        self.name = name  # under which clients ask for it
        self.path = path
        self.config = config
        self.progress: Progress | None = None  # told about each tensor that is read
        self._read_bytes = 0
        self._ahead: ReadAhead | None = None
        self._unread: set[str] = set()  # of what is read ahead

    @property
    @abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint, without aliases."""

    @abstractmethod
    def _load(self, name: str) -> HostArray:
        """Read one tensor of `infos`."""

    @abstractmethod
    def sample(self, name: str) -> bytes:
        """A few bytes of the stored tensor, for a fingerprint."""

    @abstractmethod
    def model_files(self) -> doc.ModelFiles:
        """Tokenizer, chat template and special tokens."""

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(info.nbytes for info in self.infos.values())

    def names(self) -> list[str]:
        return list(self.infos)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self.infos

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of `name`; a `CheckpointError` when there is no such tensor."""
        info = self.infos.get(self._stored_name(name))
        if info is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is missing ({self._nearest(name)})"
            )
        return info

    def tensor(
        self,
        name: str,
        shape: Iterable[int] | None = None,
        *,
        rows: range | None = None,
    ) -> HostArray:
        """The tensor `name` in its stored dtype; in float32 where it was quantised.

        With `shape` it is a weight: another stored shape, or integers, raise `CheckpointError` before it is read.
        `rows` are a part of its first dimension: only these are read from a mapped file.
        """
        from headrace.models import fp8

        info = self._check(name, shape)
        if not info.dtype.startswith("float8"):
            return self._read(name, rows)
        scaled = self.scaled(name, shape, rows=rows)
        first_row = rows.start if rows is not None and len(info.shape) == 2 else 0
        return fp8.dequantise(scaled, first_row)

    def scaled(
        self,
        name: str,
        shape: Iterable[int] | None = None,
        *,
        rows: range | None = None,
    ) -> Scaled:
        """The FP8 weight `name` as it is stored, with its scales, for a backend that computes with it.

        Where the first dimension is not one of the matrix, `rows` are a part of the scales too.
        """
        from headrace.models import fp8

        info = self._check(name, shape)
        scale_name = name + fp8.SCALE_SUFFIX
        if info.dtype != "float8_e4m3fn" or len(info.shape) < 2:
            raise CheckpointError(
                f"{info.file}: {name}: expected a matrix of float8_e4m3fn to go with {scale_name}, "
                f"found {info.dtype} {list(info.shape)}"
            )
        if scale_name not in self:
            raise CheckpointError(
                f"{info.file}: {name}: expected its scales as {scale_name}, which is missing"
            )
        expected, scale = fp8.scale_shape(info.shape), self.info(scale_name)
        if scale.shape != expected or scale.dtype != "float32":
            raise CheckpointError(
                f"{scale.file}: {scale_name}: expected float32 {list(expected)} for {name} "
                f"{list(info.shape)}, found {scale.dtype} {list(scale.shape)}"
            )
        leading = rows if len(info.shape) > 2 else None
        return fp8.Scaled(self._read(name, rows), self._read(scale_name, leading))

    def stacked(self, parts: Sequence[HostArray]) -> HostArray:
        """Matrices from `tensor` as one, on top of each other; a lone one stays the view of the file that it is."""
        if len(parts) == 1:
            return parts[0]
        if (
            len({part.dtype for part in parts}) > 1
        ):  # bfloat16 and float16 have no common dtype in numpy
            parts = [part.astype(np.float32) for part in parts]
        return np.concatenate(parts)

    def integers(self, name: str, shape: Iterable[int]) -> HostArray:
        """The tensor `name`, which must be int32 or int64 of this shape."""
        info, expected = self.info(name), tuple(shape)
        if info.shape != expected:
            raise CheckpointError(_shape_text(info, name, expected))
        if info.dtype not in ("int32", "int64"):
            raise CheckpointError(f"{info.file}: {name}: expected int32, found {info.dtype}")
        return self._read(name)

    def finished(self) -> None:
        """Say that all is read that will be: a rank needs a part, and some tensors only one kind of worker."""
        if self.progress is not None:
            self.progress(self.nbytes, self.nbytes)

    def _check(self, name: str, shape: Iterable[int] | None) -> TensorInfo:
        info = self.info(name)
        if shape is not None and info.shape != tuple(shape):
            raise CheckpointError(_shape_text(info, name, tuple(shape)))
        if shape is not None and not info.dtype.startswith(("float", "bfloat")):
            raise CheckpointError(
                f"{info.file}: {name}: expected a floating-point dtype, found {info.dtype}"
            )
        return info

    def _read(self, name: str, rows: range | None = None) -> HostArray:
        stored = self._stored_name(name)
        tensor = whole = self._load(stored)
        if rows is not None:
            assert rows.step == 1 and 0 <= rows.start <= rows.stop <= whole.shape[0]
            tensor = tensor[rows.start : rows.stop]
        stored_bytes = self.infos[stored].nbytes
        if self._ahead is not None:
            self._ahead.consumed(self._first_read(stored))
        if self.progress is not None:
            self._read_bytes += stored_bytes * tensor.size // max(whole.size, 1)
            self.progress(min(self._read_bytes, self.nbytes), self.nbytes)
        return tensor

    def _first_read(self, stored: str) -> int:
        """Bytes of a tensor that was not read before; of a part as of all of it."""
        if stored not in self._unread:
            return 0
        self._unread.remove(stored)
        return self.infos[stored].nbytes

    def place(self, name: str) -> Place | None:
        """Where the tensor of `infos` is; None where nothing can be read ahead of it."""
        del name
        return None

    @contextlib.contextmanager
    def read_ahead(
        self, names: Sequence[str], *, least_bytes: int = READ_AHEAD_FROM
    ) -> Generator[None]:
        """Have `names` read in this order while the caller loads them. A small checkpoint is not worth the threads.

        Raises `CheckpointError` where a file cannot be read.
        """
        places = [place for name in names if (place := self.place(name)) is not None]
        if sum(place.nbytes for place in places) < least_bytes:
            yield
            return
        readers = min(MOST_READERS, cores())
        ahead_bytes = min(MOST_AHEAD_BYTES, available_bytes() // 4)
        self._unread = set(names)
        try:
            with ReadAhead(places, readers=readers, ahead_bytes=ahead_bytes) as self._ahead:
                yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        finally:
            self._ahead = None

    def doc(self) -> bytes:
        """The JSON document from which the router tokenises and renders for this model."""
        return doc.model_document(self.model_files(), self.config)

    @cached_property
    def _fingerprints(self) -> doc.ModelFingerprints:
        weights = doc.weights_fingerprint(
            self.config.raw,
            {name: (info.dtype, info.shape) for name, info in self.infos.items()},
            self.sample,
        )
        return doc.fingerprints(self.model_files(), self.config, weights)

    def fingerprints(self) -> doc.ModelFingerprints:
        """Digests of weights, tokenizer and chat template: equal on every host that has the same model."""
        return self._fingerprints

    def _stored_name(self, name: str) -> str:
        """`name`, or the other name of a tied tensor where only that one is stored."""
        if self.config.tie_word_embeddings:
            if name == HEAD and EMBEDDING in self.infos:
                return EMBEDDING
            if name == EMBEDDING and name not in self.infos:
                return HEAD
        return name

    def _nearest(self, name: str) -> str:
        import difflib

        near = difflib.get_close_matches(name, self.infos, n=1, cutoff=0.8)
        return f"the nearest is {near[0]!r}" if near else f"of {len(self.infos)} tensors"


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face directory: config.json, tokenizer files, model.safetensors or shards with an index."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        """Open and check `directory`; no weight is read. Raises `ModelFileError`."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        super().__init__(name or directory.resolve().name, directory, read_config(directory))
        self._files = _open_files(directory)
        self._infos: dict[str, TensorInfo] = {}
        for file in self._files.values():
            for key, entry in file.entries.items():
                dtype = DTYPES.get(entry.dtype)
                if dtype is None:
                    raise CheckpointError(
                        f"{file.path}: {key}: dtype {entry.dtype!r} is not supported; "
                        f"supported: {', '.join(DTYPES)}"
                    )
                if key in self._infos:
                    raise CheckpointError(
                        f"{directory}: tensor {key!r} is in two shards, "
                        f"{self._infos[key].file} and {file.path.name}"
                    )
                self._infos[key] = TensorInfo(file.path.name, dtype, entry.shape, entry.nbytes)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def _load(self, name: str) -> HostArray:
        return self._files[self._infos[name].file].tensor(name)

    def place(self, name: str) -> Place | None:
        file = self._files[self._infos[name].file]
        entry = file.entries[name]
        return Place(file.path, entry.start, entry.nbytes)

    def sample(self, name: str) -> bytes:
        return self._files[self._infos[name].file].sample(name)

    @cached_property
    def _model_files(self) -> doc.ModelFiles:
        return doc.read_model_files(self.path)

    def model_files(self) -> doc.ModelFiles:
        return self._model_files


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """The weight files of `directory` by name, each with its header checked."""
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise CheckpointError(_no_weights(directory))
        return {single.name: SafetensorsFile(single)}
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index_path}: weight_map: expected an object of tensor names to files"
        )
    shards: dict[str, set[str]] = {}
    for key, shard in weight_map.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(shard, str) or not isinstance(key, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: {key}: expected a file name, found {shard!r}")
        shards.setdefault(shard, set()).add(key)
    missing = sorted(shard for shard in shards if not (directory / shard).exists())
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}"
        )
    files = {shard: SafetensorsFile(directory / shard) for shard in sorted(shards)}
    for shard, keys in shards.items():
        lost = sorted(keys - files[shard].entries.keys())
        if lost:
            raise CheckpointError(
                f"{directory / shard}: tensor {lost[0]!r} is missing; {index_path.name} says it is there"
            )
    return files


def _no_weights(directory: Path) -> str:
    pickled = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*"))
    if pickled:
        return f"{directory}: {pickled[0].name} is a pickle, which can run code; only safetensors is read"
    return f"{directory}: model.safetensors is missing, and model.safetensors.index.json too"


def _shape_text(info: TensorInfo, name: str, expected: tuple[int, ...]) -> str:
    return f"{info.file}: {name}: expected shape {list(expected)}, found {list(info.shape)}"

"""Stored blocks in columns, as sequences that decode give them: each is the child of a block that was there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, SupportsIndex, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from headrace.wire.frames import StoredRun

_RUN: Final = np.dtype([("run", "V2"), ("parent", ">u8"), ("bytes", "V2"), ("key", "<u8")])
_ARRAY_OF_TWO_U64 = b"\x92\xcf"
_EIGHT_BYTES = b"\xc4\x08"
_LEAST_U64: Final = 1 << 32  # msgpack writes smaller numbers in fewer bytes


class SingleRuns(Sequence[StoredRun]):
    """Runs of one block each, none of which is a first block. They are equal to a list of the same runs."""

    __slots__ = ("keys", "parents")

    def __init__(self, parents: NDArray[np.uint64], keys: NDArray[np.uint64]) -> None:
        assert len(parents) == len(keys)
        self.parents = parents
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> StoredRun: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[StoredRun]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> StoredRun | list[StoredRun]:
        return list(self)[index]

    def __iter__(self) -> Iterator[StoredRun]:
        for parent, key in zip(self.parents.tolist(), self.keys.tolist(), strict=True):
            yield StoredRun(parent, key.to_bytes(8, "little"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, SingleRuns)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it is equal to lists

    def encode_rows(self, one: Callable[[StoredRun, int], bytes]) -> bytes:
        """The field `stored` of `Blocks`; `one` writes a run, of a row."""
        header: bytes = msgpack.Packer().pack_array_header(len(self))
        if len(self) and self.parents.min() < _LEAST_U64:
            return header + b"".join(one(run, row) for row, run in enumerate(self))
        rows = np.empty(len(self), dtype=_RUN)
        rows["run"], rows["bytes"] = _ARRAY_OF_TWO_U64, _EIGHT_BYTES
        rows["parent"], rows["key"] = self.parents, self.keys
        return header + rows.tobytes()

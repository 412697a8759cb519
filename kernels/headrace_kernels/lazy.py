"""A sequence whose items are made when they are asked for: the experts of a layer are not in memory together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """`make(i)` for each `i` of `indices`, every time anew."""

    def __init__(self, indices: Sequence[int], make: Callable[[int], T]) -> None:
        self._indices, self._make = indices, make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return Lazy(self._indices[index], self._make)
        return self._make(self._indices[index])

"""Files of weights in memory, as they are on disk."""

from __future__ import annotations

import mmap
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


def mapped(file: BinaryIO) -> mmap.mmap:
    """All of `file`, shared and read-only.

    A private mapping counts as memory that this process may take: one of hundreds of gigabytes is refused by a kernel
    that promises no more than it has (vm.overcommit_memory=2).
    """
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def array_of(whole: mmap.mmap) -> NDArray[np.uint8]:
    """The bytes as an array that lives as long as any view of it. Whoever writes to it is killed.

    It says that it can be written: torch knows no other memory, and warns of it.
    """
    return np.asarray(_Bytes(whole))


class _Bytes:
    def __init__(self, whole: mmap.mmap) -> None:
        self._whole = whole
        interface: dict[str, Any] = np.frombuffer(whole, np.uint8).__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}

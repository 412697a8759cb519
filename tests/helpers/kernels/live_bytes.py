"""Counts the memory of tensors while some code runs: what an allocator would have to hand out at most."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`most` bytes of tensors that operations made since it was entered, and that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._old: dict[int, StorageWeakRef] = {}  # came from outside

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if torch.is_tensor(tensor) and id_of(tensor) not in self._live:
                self._old[id_of(tensor)] = StorageWeakRef(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and not self._is_old(tensor):
                storage = tensor.untyped_storage()
                self._live[id_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result

    def _is_old(self, tensor: torch.Tensor) -> bool:
        known = self._old.get(id_of(tensor))
        return known is not None and not known.expired()


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

"""Weights for the CPU kernels: mapped as they lie packed in the cache, or packed into memory of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.packed_cache import packed_folder
from headrace.models.load.survey import Survey
from headrace_kernels.native import NativeBackend
from headrace_kernels.ops import Attention, MlaAttention
from headrace_kernels.packed import PackedBackend, PackingBackend

log = logging.getLogger(__name__)

W = TypeVar("W")


def on_cpu(
    checkpoint: Checkpoint,
    attention: Attention | MlaAttention,
    dtype: str,
    names: list[str],
    load: Callable[[Checkpoint, NativeBackend], W],
    *,
    drafts: bool = False,
) -> tuple[NativeBackend, W]:
    """A backend and what `load` makes of the checkpoint with it, whose tensors it reads are `names`.

    With `drafts` it reads the layer that drafts, too. Where the cache cannot be used the log says so.
    """

    def pack(folder: Path) -> None:
        packing = PackingBackend(attention, dtype=dtype, folder=folder)
        with checkpoint.read_ahead(names):
            load(checkpoint, packing)
        packing.finish()

    folder = packed_folder(checkpoint, dtype, pack, drafts=drafts)
    if folder is not None:
        try:
            packed = PackedBackend(attention, dtype=dtype, folder=folder)
            return packed, load(Survey(checkpoint), packed)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # what is in a file may be anything
            log.warning("%s: %s; weights are packed into this worker's own memory", folder, error)
    return in_own_memory(checkpoint, attention, dtype, names, load)


def in_own_memory(
    checkpoint: Checkpoint,
    attention: Attention | MlaAttention,
    dtype: str,
    names: list[str],
    load: Callable[[Checkpoint, NativeBackend], W],
) -> tuple[NativeBackend, W]:
    """The same without a cache."""
    native = NativeBackend(attention, dtype=dtype)
    with checkpoint.read_ahead(names):
        return native, load(checkpoint, native)

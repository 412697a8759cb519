"""Weights packed for the CPU kernels, kept in the user's cache: workers of a machine map the same copy.

A folder is named by all that its bytes follow from: the weights' fingerprint, size and time of their files, dtype and
format. It appears whole or not at all, and few of them are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.models.load.cache import CachedModel, CacheError, cache_root, ensure
from headrace.models.load.checkpoint import Checkpoint
from headrace_kernels.packed import FORMAT, PackedError

log = logging.getLogger(__name__)

LEAST_BYTES = 32 << 20  # of a checkpoint; a smaller one is packed in a moment
MOST_KEPT = 4  # models and dtypes; of more the ones that were used longest ago are removed
PREFIX = "packed-"
PARTIAL_S = 86_400.0  # after which nobody still writes one
# Of an element, with scales and what panels lack.
BYTES_OF = {"int8": 1.1, "bfloat16": 2.1, "float16": 2.1, "float32": 4.2}


def packed_folder(
    checkpoint: Checkpoint,
    dtype: str,
    pack: Callable[[Path], None],
    *,
    drafts: bool = False,
    root: Path | None = None,
    least_bytes: int = LEAST_BYTES,
) -> Path | None:
    """Where the weights of `checkpoint` lie packed as `dtype`; the first call has `pack` fill an empty folder.

    With `drafts` those of the layer that drafts are among them, in a folder of its own.

    Any number of processes may call this at once: one works, the others wait for it. `None` where packing is not worth
    a file, or where the cache cannot be used, which is logged.
    """
    if checkpoint.nbytes < least_bytes or sys.byteorder != "little":
        return None
    of = _of(checkpoint, dtype) | ({"drafts": True} if drafts else {})
    name = f"{PREFIX}{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]}"
    elements = sum(math.prod(info.shape) for info in checkpoint.infos.values())
    entry = CachedModel(
        name=name,
        directory_name=name,
        # The embedding comes twice: rows to look up, and with a tied head a matrix.
        disk_bytes=int(elements * BYTES_OF[dtype]) + 2 * checkpoint.nbytes,
        origin=of,
    )

    def make(_work: Path, out: Path) -> None:
        log.info("packing %s as %s, once, into %s", checkpoint.name, dtype, cache_root())
        pack(out)

    try:
        folder = ensure(entry, make, root=root, say=log.info)
    except (CacheError, PackedError) as error:
        log.warning("%s: weights are packed into this worker's own memory", error)
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / "manifest.json")
        _forget_oldest(folder)
    return folder


def _of(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """What the bytes depend on. A fingerprint saw a part of the weights; a file that changed has another time."""
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = sorted({info.file for info in checkpoint.infos.values()})
    stats = {name: (base / name).stat() for name in names}
    return {
        "format": FORMAT,
        "dtype": dtype,
        "weights": checkpoint.fingerprints().weights,
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()],
    }


def _forget_oldest(used: Path) -> None:
    """Whoever has one mapped keeps it until it ends."""
    folders = [folder for folder in used.parent.glob(f"{PREFIX}*") if folder.is_dir()]
    folders.sort(key=_used_ns)
    for folder in folders[:-MOST_KEPT]:
        if folder != used:
            shutil.rmtree(folder, ignore_errors=True)
    for partial in used.parent.glob(f".{PREFIX}*.partial"):  # of a worker that was killed
        if time.time() - partial.stat().st_mtime > PARTIAL_S:
            shutil.rmtree(partial, ignore_errors=True)


def _used_ns(folder: Path) -> int:
    try:
        return (folder / "manifest.json").stat().st_mtime_ns
    except OSError:
        return 0  # what is left of one that was being removed

"""The user's cache: a model directory is made there once, checked on each use, and shared by all processes.

A directory appears by a rename when it is complete, and its manifest says what each file was then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.config import ModelFileError

__all__ = ["CacheError", "CachedModel", "Report", "cache_root", "ensure", "to_stderr"]

LOCK_WAIT_S = 1800.0
POLL_S = 0.2

Report = Callable[[str], None]  # gets a line for each step


class CacheError(ModelFileError):
    """A model could not be made or kept in the cache; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One model directory of the cache."""

    name: str  # of the model, for people
    directory_name: str  # changes with everything that changes what is in it
    disk_bytes: int  # at most, while it is made
    origin: Mapping[str, Any]  # goes into the manifest


# Fills a new directory (the second path); the first is for what is not kept.
Make = Callable[[Path, Path], None]


def cache_root() -> Path:
    """`$HEADRACE_CACHE`, or `headrace` in the user's cache folder."""
    chosen = os.environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "headrace"


def ensure(entry: CachedModel, make: Make, *, root: Path | None, say: Report) -> Path:
    """The directory of `entry`, made by the first call or where it was damaged.

    Any number of processes may call this at once: one works, the others wait for it. Raises `CacheError`, and
    what `make` raises.
    """
    models = (root or cache_root()) / "models"
    target = models / entry.directory_name
    if _fault(target) is None:
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{entry.name}.lock", entry.name, say):
            fault = _fault(target)
            if fault is not None:
                if target.exists():
                    say(f"{target}: {fault}; making {entry.name} again")
                _make(entry, make, target)
    except OSError as error:
        raise CacheError(
            f"{models}: {error.strerror or error}; set HEADRACE_CACHE to a folder with "
            f"{entry.disk_bytes // 10**6} MB of room that can be written"
        ) from error
    return target


def _make(entry: CachedModel, make: Make, target: Path) -> None:
    """Make the directory beside `target`, then rename it into place: it is never there in part."""
    work = target.parent / f".{entry.directory_name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir()
    try:
        free = shutil.disk_usage(work).free
        if free < entry.disk_bytes:
            raise CacheError(
                f"{target.parent}: {entry.name} needs {entry.disk_bytes // 10**6} MB, "
                f"{free // 10**6} MB are free; set HEADRACE_CACHE to a larger disk"
            )
        made = work / "made"
        made.mkdir()
        make(work, made)
        _write_manifest(entry.origin, made)
        if target.exists():
            target.rename(work / "broken")
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(origin: Mapping[str, Any], directory: Path) -> None:
    files: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            # Before the rename, so that a power cut cannot leave empty files.
            os.fsync(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        stat = path.stat()
        files[path.name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    text = json.dumps({**origin, "files": files}, ensure_ascii=False, indent=1)
    (directory / "manifest.json").write_text(text, encoding="utf-8")


def _fault(directory: Path) -> str | None:
    """None if every file is as it was written, else what is wrong.

    Size and modification time are compared; a file is hashed only where its time differs (a copied cache),
    so that a start does not read half a gigabyte twice.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / "manifest.json").read_bytes())[
            "files"
        ]
        for name, expected in files.items():
            path = directory / name
            stat = path.stat()
            if stat.st_size != expected["bytes"]:
                return f"{name} is {stat.st_size} bytes, expected {expected['bytes']}"
            if stat.st_mtime_ns != expected["mtime_ns"]:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                        return f"{name} was changed: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be used: {error!r}"
    return None


@contextlib.contextmanager
def _lock(path: Path, name: str, say: Report) -> Generator[None]:
    """Hold an exclusive lock. The system frees it when the holder dies, however it dies."""
    deadline = time.monotonic() + LOCK_WAIT_S
    told = False
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CacheError(
                        f"{path}: another process has held this lock for {LOCK_WAIT_S:.0f} s; is it stuck?"
                    ) from None
                if not told:
                    say(f"another process is making {name}; waiting for it")
                    told = True
                time.sleep(POLL_S)
        yield


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")

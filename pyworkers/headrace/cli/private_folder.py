"""A folder of this process alone, for the sockets of `headrace serve`: gone at its end, or at the next start.

It takes no room on a disk: it holds sockets, and is locked itself. Whoever can lock one knows that its owner is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path

from headrace.settings.values import SettingsError

PREFIX = "headrace-serve-"
LONGEST_NAME = len("/router.sock")
SOCKET_PATH_BYTES = 104  # of the shortest bound there is, that of macOS; Linux has 108

FALLBACKS = ("/tmp", "/dev/shm", "/var/tmp")  # memory is seldom as full as a disk


def parents() -> list[Path]:
    """Where such a folder may be: in TMPDIR, or if that takes nothing, in memory."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR")]
    runtime = named.pop()
    found = [*named, "/tmp", runtime, *FALLBACKS]
    return list(dict.fromkeys(Path(name).absolute() for name in found if name))


@contextlib.contextmanager
def private_folder(among: Iterable[Path] | None = None) -> Generator[Path]:
    """A folder that only we may enter, in the first place that takes one. Folders of dead owners go first.

    Raises SettingsError if no place takes one.
    """
    places = list(parents() if among is None else among)
    for place in places:
        remove_dead(place)
    folder, lock = _create(places)
    try:
        yield folder
    finally:
        _remove(folder, lock)


def remove_dead(place: Path) -> list[Path]:
    """Remove folders in `place` that are ours and whose owner does not live; those that were removed."""
    removed: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            folder = Path(entry.path)
            lock = _lock(folder) if entry.name.startswith(PREFIX) else None
            if lock is not None and _remove(folder, lock):
                removed.append(folder)
    return removed


def _create(places: list[Path]) -> tuple[Path, int]:
    tried: list[str] = []
    for place in places:
        if len(os.fsencode(place)) + len(PREFIX) + 9 + LONGEST_NAME >= SOCKET_PATH_BYTES:
            tried.append(f"{place} (too long a path for a socket)")
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            tried.append(f"{place} ({error.strerror})")
            continue
        lock = _lock(folder)
        if lock is None:  # another start took it for a dead one before it was locked
            with contextlib.suppress(OSError):
                folder.rmdir()
            tried.append(f"{place} (its folders cannot be locked)")
            continue
        try:
            _try_socket(folder)
        except OSError as error:
            _remove(folder, lock)
            tried.append(f"{place} ({error.strerror})")
            continue
        return folder, lock
    raise SettingsError(
        f"no place for a socket: {', '.join(tried)}; make room, or name another TMPDIR"
    )


def _try_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(folder / "probe"))
    (folder / "probe").unlink()


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if it is not ours, no folder, or its owner lives."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(lock)
        if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(found, folder.lstat()):
                return lock  # and not one that was just removed
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(folder: Path, lock: int) -> bool:
    """Remove a folder that is locked, with the files in it; one with folders in it is none of ours, and stays."""
    try:
        for name in os.listdir(lock):
            os.unlink(name, dir_fd=lock)
        folder.rmdir()
    except OSError:
        return False
    finally:
        os.close(lock)
    return True

"""A disk without room: a tiny tmpfs that only one process and its children see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FULL = 'mount -t tmpfs -o size=64k,nr_inodes=8 none "$0" && cd "$0" || exit 99; '
FILL = "cat /dev/zero > fill 2>/dev/null; touch i1 i2 i3 i4 i5 i6 i7 i8 2>/dev/null; "
RUN = 'cd - >/dev/null; exec "$@" 2>> "$LOG"'


@cache
def can_mount() -> bool:
    """Whether this user may have a file system of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    probe = [unshare, "-rm", "sh", "-c", "mount -t tmpfs none /tmp"]
    return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0


def on_full_disk(folder: Path, program: Sequence[str]) -> list[str]:
    """A command line that runs `program` where `folder` is a full disk, with its standard error there.

    Where nothing may be mounted, no file of the process may grow instead.
    """
    log = folder / "fill"  # the one file there is; without a disk of its own, it is made
    if can_mount():
        script = f"LOG={log}; {FULL}{FILL}{RUN}"
        return ["unshare", "-rm", "sh", "-c", script, str(folder), *program]
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        f"os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", limit, *program]


def make_room(folder: Path, pid: int) -> Path:
    """Empty the disk of the process with this id; the file that its standard error goes to."""
    seen = Path(f"/proc/{pid}/root{folder}")
    for path in list(seen.iterdir()):
        if path.name.startswith("i"):
            path.unlink()
    os.truncate(seen / "fill", 0)
    return seen / "fill"

"""How much memory this machine has, and how much of it is free."""

from __future__ import annotations

import os
from pathlib import Path


def machine_bytes() -> int:
    """Memory of the machine, or what its control group allows of it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit = _lines(Path("/sys/fs/cgroup") / "memory.max")
    if limit and limit[0].isdigit():
        limits.append(int(limit[0]))
    return min(limits)


def available_bytes() -> int:
    """Memory that this process may still take: of the machine, and of its control group."""
    limits = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits[0] = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdigit():
        limits.append(max(int(limit[0]) - int(used[0]), 0))
    return min(limits)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

"""What the operating system knows of this process, under the names that Prometheus' own libraries use. Linux alone."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from headrace.worker.endpoint.exposition import MetricFamily, single

FOLDER = Path("/proc/self")
# Fields of /proc/PID/stat behind the name: CPU time in user and in system code, and the start after the machine's.
_USER, _SYSTEM, _STARTED = 11, 12, 19


def of_process(folder: Path = FOLDER) -> list[MetricFamily]:
    """Nothing where the system does not tell it."""
    try:
        # the name, which may hold spaces and brackets, ends with the last bracket
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text()
        open_files = len(os.listdir(folder / "fd"))  # noqa: PTH208  names, no paths
        booted = (folder.parent / "stat").read_text()
    except OSError:
        return []
    ticks = os.sysconf("SC_CLK_TCK")
    booted_s = next(int(line.split()[1]) for line in booted.splitlines() if line[:6] == "btime ")
    values = {
        "resident_memory_bytes": (_kib(status, "VmRSS") << 10, "Resident memory."),
        "virtual_memory_bytes": (_kib(status, "VmSize") << 10, "Memory that has addresses."),
        "start_time_seconds": (
            booted_s + int(stat[_STARTED]) / ticks,
            "When the process started, since 1970.",
        ),
        "open_fds": (open_files, "Open file descriptors."),
        "max_fds": (
            float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            "File descriptors that may be open.",
        ),
    }
    cpu_s = (int(stat[_USER]) + int(stat[_SYSTEM])) / ticks
    return [
        single("process_cpu_seconds_total", "counter", "User and system CPU time.", cpu_s),
        *(single(f"process_{name}", "gauge", about, n) for name, (n, about) in values.items()),
    ]


def _kib(status: str, name: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))

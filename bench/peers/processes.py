"""What processes use: CPU time, memory, descriptors."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

import psutil

SAMPLE_S = 0.1
QUIET_S = 2.0
QUIET_CORES = 0.1


def raise_descriptor_limit(most: int | None = None) -> int:
    """As many descriptors as this process may have, `most` at most, for it and its children; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if most is None else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return limit


def tree(*roots: int) -> list[int]:
    """Processes, and all that descend from them."""
    found: list[int] = []
    for root in roots:
        found += [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return found


def total(processes: Iterable[int], of_one: Callable[[psutil.Process], float]) -> float:
    """A sum over processes, in which those that have ended count nothing."""
    found = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += of_one(psutil.Process(process))
    return found


def cpu_s(processes: Iterable[int]) -> float:
    """User and system time of all threads of all of them."""

    def of_one(process: psutil.Process) -> float:
        times = process.cpu_times()
        return times.user + times.system

    return total(processes, of_one)


def resident_mib(processes: Iterable[int]) -> float:
    """Resident memory of all of them."""
    return total(processes, lambda process: process.memory_info().rss) / (1 << 20)


def machine_cpu_s() -> float:
    """CPU time of everything on this machine: all but idle time and the wait for disks."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait  # what guests take is in `user`


class Watch:
    """The most memory that some processes have while it runs, looked at ten times a second."""

    def __init__(self, processes: list[int]) -> None:
        self.processes = processes
        self.peak_mib = resident_mib(processes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self.peak_mib = max(self.peak_mib, resident_mib(self.processes))


def wait_until_quiet(processes: list[int], limit_s: float) -> bool:
    """Wait until they have next to nothing to do; false when that took too long."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = cpu_s(processes)
        time.sleep(QUIET_S)
        if cpu_s(processes) - before < QUIET_S * QUIET_CORES:
            return True
    return False

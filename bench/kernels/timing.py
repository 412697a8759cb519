"""How long a call takes: on a GPU by its own clock, with a cold L2; without one by the host's, which says nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

Call = Callable[[], object]

LEAST_CALLS, MOST_CALLS = 5, 30
BUSY_US = 60_000  # of measured calls, about
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far
CYCLES_PER_US = 2_000  # of a GPU's clock, at most about this many
MOST_SLEEP_US = 100_000
LONG_US = 200_000  # calls that take longer are repeated as seldom as can be


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds. `host_us` is what the caller's thread takes to start the work, and may be more than the rest."""

    us: float  # median
    least_us: float
    most_us: float
    host_us: float
    calls: int


class Clock(Protocol):
    dry: bool

    def time(self, call: Call) -> Times: ...


class GpuClock:
    """CUDA events around each call. Before it the L2 is filled with other bytes, and the GPU is kept busy until the
    host has started all of the call: the time is that of the GPU's work in a row, as a graph of it would run.
    """

    dry = False

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, call: Call) -> Times:
        call()  # compiles
        torch.cuda.synchronize()
        host_us, whole_us = self._by_host(call)
        for _ in range(2 if whole_us < LONG_US else 0):
            host_us = min(host_us, self._by_host(call)[0])
        sleep = int(min(1.5 * host_us + 50, MOST_SLEEP_US) * CYCLES_PER_US)
        first = self._once(call, sleep)
        least = LEAST_CALLS if first < LONG_US else 2
        calls = int(min(MOST_CALLS, max(least, BUSY_US / max(first, 1.0))))
        spent = [self._once(call, sleep) for _ in range(calls)]
        return Times(statistics.median(spent), min(spent), max(spent), host_us, calls)

    def _by_host(self, call: Call) -> tuple[float, float]:
        """Microseconds until the call returns, and until the GPU has done it."""
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return (returned - began) * 1e6, (time.perf_counter() - began) * 1e6

    def _once(self, call: Call, sleep: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        cast("Any", torch.cuda)._sleep(sleep)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3


class HostClock:
    """One call by the host's clock: shows that the call can be timed, and is of no other use."""

    dry = True

    def time(self, call: Call) -> Times:
        began = time.perf_counter()
        call()
        us = (time.perf_counter() - began) * 1e6
        return Times(us, us, us, us, 1)

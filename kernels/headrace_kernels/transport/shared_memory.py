"""Parcels through memory that all ranks of a host map: each writes straight into the buffers of the rank that receives.

Every pair of ranks has a channel of two slices in the memory of the receiver. The sender copies rows into a slice and
publishes a count; the receiver looks for it, at first without and then with sleep, and copies the rows to where they
are used. A parcel longer than a slice goes in pieces, each rank taking while it sends. Layout, waiting and failures:
bindings/src/ranks/.

Memory: `ranks**2 * 2 * slice_bytes`, taken at the start, so that a full /dev/shm is found there. The file has no name
once all ranks have mapped it: it goes with the last process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from headrace import _core
from headrace_kernels.moe.dispatch import Combine
from headrace_kernels.moe.placement import Replicas
from headrace_kernels.moe.transport import Arrived, Columns, OnLost, RankLost, Span
from headrace_kernels.transport.host_bytes import (
    as_bytes,
    back_to,
    empty_rows,
    on_host,
    row_bytes,
)

SLICE_BYTES = 256 << 10  # holds the rows of a decode step; a guess for longer parcels
DEADLINE_S = 10.0
MEETING_S = 120.0  # ranks load weights before they meet
LOOK_MS = 20  # between two looks at a file that another rank makes or takes away


class SharedMemory:
    """The `Transport` of one rank. `close` may be called from any thread, the rest from one at a time."""

    def __init__(self, parcels: _core.SharedParcels, rank: int, ranks: int) -> None:
        self._parcels = parcels
        self.rank = rank
        self.ranks = ranks

    @classmethod
    def join(
        cls,
        path: Path,
        *,
        rank: int,
        ranks: int,
        slice_bytes: int = SLICE_BYTES,
        deadline_s: float = DEADLINE_S,
        meeting_s: float = MEETING_S,
        given_up: Callable[[], bool] = lambda: False,
    ) -> SharedMemory:
        """Meet the other ranks at `path`, a name in /dev/shm that this group alone has.

        `given_up` says whether rank 0 could not make the memory, which nobody sees by a file that is not there.

        Raises RankLost for a rank that does not come, ValueError where ranks were started with different sizes, and
        OSError where the memory cannot be had.
        """
        began = time.monotonic()
        nbytes = _core.SharedParcels.memory_bytes(ranks, slice_bytes)
        try:
            with _opened(path, rank, nbytes, began + meeting_s, given_up) as file:
                parcels = _core.SharedParcels(
                    mmap.mmap(file, nbytes),
                    rank=rank,
                    ranks=ranks,
                    slice_bytes=slice_bytes,
                    timeout_ms=round(deadline_s * 1e3),
                )
                _meet(parcels, file, began, meeting_s)
        except FileExistsError:
            raise  # another group's
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)  # each rank does so: the first may be gone by now
        return cls(parcels, rank, ranks)

    def begin(self, round_number: int) -> None:
        self._parcels.begin(round_number)

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        host = on_host(columns)
        widths = [row_bytes(column) for column in host]
        self._parcels.post([as_bytes(column) for column in host], widths, parcels)

        def wait() -> Arrived:
            counts = self._parcels.arrived()
            arrived = empty_rows(host, sum(counts))
            self._parcels.take([as_bytes(column) for column in arrived], widths)
            return Arrived(back_to(arrived, columns), counts)

        return wait

    def layer_exchange(
        self, home: Replicas, combine: Combine, on_lost: OnLost | None = None
    ) -> _core.SharedExchange:
        return _core.SharedExchange(
            self._parcels,
            owners=home.rank.numpy(),
            slots=home.slot.numpy(),
            partial=combine == "partial",
            on_lost=on_lost,
        )

    @property
    def waited_s(self) -> float:
        return self._parcels.waited_s

    @property
    def waits_s(self) -> float:
        return self._parcels.waits_s

    def abort(self, reason: str) -> None:
        self._parcels.abort(reason)

    def close(self) -> None:
        self._parcels.close()


def _meet(parcels: _core.SharedParcels, file: int, began: float, meeting_s: float) -> None:
    while True:
        given_up = (
            os.fstat(file).st_nlink == 0
        )  # its name goes when all have joined, or when one cannot
        absent = parcels.join(timeout_ms=LOOK_MS)
        if absent is None:
            return
        if given_up:
            raise RankLost(absent, "the first meeting, which a rank gave up: see what it says")
        if time.monotonic() - began >= meeting_s:
            raise RankLost(absent, f"the first meeting, {meeting_s:.1f} s")


@contextlib.contextmanager
def _opened(
    path: Path, rank: int, nbytes: int, until: float, given_up: Callable[[], bool]
) -> Generator[int]:
    """The file of the group, as long as it has to be."""
    file = _made(path, nbytes) if rank == 0 else _found(path, nbytes, until, given_up)
    try:
        yield file
    finally:
        os.close(file)


def _made(path: Path, nbytes: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(
                file, 0, nbytes
            )  # memory that is missing is found here, not by a signal later
        else:
            os.ftruncate(file, nbytes)
    except OSError as error:
        os.close(file)
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        what = f"{path}: no room for {nbytes >> 20} MiB: give /dev/shm more (docker: --shm-size)"
        raise OSError(errno.ENOSPC, what) from error
    return file


def _found(path: Path, nbytes: int, until: float, given_up: Callable[[], bool]) -> int:
    """Another rank's file, once it is there in full."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            size = os.fstat(file).st_size
            if size == nbytes:
                return file
            os.close(file)
            if size:
                raise ValueError(
                    f"{path} has {size} bytes and not {nbytes}: ranks were started with different sizes"
                )
        if given_up():
            raise OSError("rank 0 has no memory for the group: see what it says")
        if time.monotonic() >= until:
            raise RankLost(0, f"{path} was not there in time")
        time.sleep(LOOK_MS / 1e3)

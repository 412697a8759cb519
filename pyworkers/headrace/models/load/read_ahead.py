"""Threads that read a checkpoint's files before the loader needs them.

A loader maps files and touches one page after the other, which keeps one read in flight; a disk or a network file
system wants many. Readers go through the tensors in the loader's order and leave them in the page cache. They are as
many as cores, and stay a bounded number of bytes ahead: what is read too early is gone again when it is needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Piece", "Place", "ReadAhead", "cores", "pieces"]

MOST_READERS = 8  # a guess
MOST_AHEAD_BYTES = 4 << 30  # a guess
PIECE_BYTES = 16 << 20  # of one read; a guess


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring bytes of a file, and how many bytes come before them."""

    place: Place
    before: int


def pieces(places: Iterable[Place], most_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The same bytes in the same order: small tensors that are neighbours together, large ones in parts."""
    before = 0
    waiting: Place | None = None
    for place in places:
        if (
            waiting is not None
            and (waiting.path, waiting.start + waiting.nbytes) == (place.path, place.start)
            and waiting.nbytes + place.nbytes <= most_bytes
        ):
            waiting = Place(waiting.path, waiting.start, waiting.nbytes + place.nbytes)
            continue
        if waiting is not None:
            yield Piece(waiting, before)
            before += waiting.nbytes
        start, end = place.start, place.start + place.nbytes
        while end - start > most_bytes:
            yield Piece(Place(place.path, start, most_bytes), before)
            before += most_bytes
            start += most_bytes
        waiting = Place(place.path, start, end - start)
    if waiting is not None:
        yield Piece(waiting, before)


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read(place: Place) -> None:
    """Have the bytes in the page cache."""
    with place.path.open("rb", buffering=0) as file:
        at, end = place.start, place.start + place.nbytes
        while at < end:
            count = len(os.pread(file.fileno(), end - at, at))
            if count == 0:
                raise OSError(f"{place.path}: the file ends at byte {at}, before {end}")
            at += count


class ReadAhead:
    """Reads while it is entered. `consumed` says how far the loader is."""

    def __init__(
        self,
        places: Iterable[Place],
        *,
        readers: int,
        ahead_bytes: int,
        read: Callable[[Place], None] = read,
    ) -> None:
        self._pieces = pieces(places, max(1, min(PIECE_BYTES, ahead_bytes // readers)))
        self._ahead_bytes = ahead_bytes
        self._read = read
        self._consumed = 0
        self._stopped = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"read-ahead-{i}", daemon=True)
            for i in range(readers)
        ]

    def consumed(self, nbytes: int) -> None:
        """The loader took so many bytes more. Raises the `OSError` of a reader."""
        with self._changed:
            self._consumed += nbytes
            self._changed.notify_all()
            if self._error is not None:
                raise self._error

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._read(piece.place)
            except OSError as error:
                with self._changed:
                    self._error, self._stopped = error, True
                    self._changed.notify_all()

    def _next(self) -> Piece | None:
        """The next one, once it is not too far ahead."""
        with self._changed:
            piece = None if self._stopped else next(self._pieces, None)
            if piece is None:
                return None
            end = piece.before + piece.place.nbytes
            while not self._stopped and end > self._consumed + self._ahead_bytes:
                self._changed.wait()
            return None if self._stopped else piece

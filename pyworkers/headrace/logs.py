"""Standard output and error that nobody waits for: a bounded buffer each, and a thread that writes.

Where a pipe is not read, a terminal is stopped or a disk is full, lines are lost, and the next one that gets through
says how many. Logging, `print`, warnings and tracebacks all go through `sys.stderr`, so that is what is replaced. The
router does the same in Rust (`router/src/log`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TextIO, cast

WAITING_BYTES = 1 << 20  # that may wait; some 10,000 lines. A guess
PIECE_BYTES = 4096  # whole lines up to this go into a pipe as one piece, whoever else writes to it
LAST_LINES_S = 0.2  # for what waits at the end of the process


@dataclass(slots=True)
class Lost:
    """Lines that did not get out."""

    too_slow: int = 0  # they found no room
    write_failed: int = 0

    def __bool__(self) -> bool:
        return bool(self.too_slow or self.write_failed)


class Lines:
    """The way to the thread that writes to a descriptor. It starts with the first line."""

    def __init__(self, fd: int) -> None:
        self.lost = Lost()
        self.line_of: Callable[[str], str] = "WARNING {}".format  # the form of the other lines
        self._fd = fd
        # reentrant: a finaliser may log while a line is added
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._turned_away = 0  # lines that found no room since the thread last was here
        self._writing = False
        self._thread: threading.Thread | None = None
        # the thread's own
        self._untold = Lost()
        self._reason = ""
        self._torn = False  # a write broke off inside of a line

    def push(self, line: bytes) -> None:
        """Add a line, its end included, or count it as lost. Never waits for a write."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # it is not in a fork of us
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            # once one found no room, none does until the thread is back: what is lost is one gap
            if self._turned_away or self._bytes + len(line) > WAITING_BYTES:
                self._turned_away += 1
                self.lost.too_slow += 1
            else:
                self._waiting.append(line)
                self._bytes += len(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float = LAST_LINES_S) -> bool:
        """Wait until all is written, but not longer than that; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._turned_away or self._writing), timeout_s
            )

    def _run(self) -> None:
        while True:
            batch, turned_away = self._take()
            for piece in _pieces(batch):
                self._write(piece)
            self._untold.too_slow += turned_away
            if turned_away:
                self._write(b"")  # only what is to be said of it

    def _take(self) -> tuple[deque[bytes], int]:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._turned_away)
            self._writing = True
            batch, self._waiting, self._bytes = self._waiting, deque(), 0
            turned_away, self._turned_away = self._turned_away, 0
            return batch, turned_away

    def _write(self, lines: bytes) -> None:
        """Write lines, and before them how many were lost; count those that are lost now."""
        if self._untold:
            if not self._write_whole(self._notice()):
                self._lose(lines)
                return
            self._untold = Lost()
        self._write_whole(lines, lose=True)

    def _write_whole(self, data: bytes, lose: bool = False) -> bool:
        done = 0
        try:
            if self._torn and data:
                _write_some(self._fd, b"\n")
                self._torn = False
            while done < len(data):
                done += _write_some(self._fd, data[done:])
        except OSError as error:
            self._torn = self._torn or (done > 0 and data[done - 1 : done] != b"\n")
            self._reason = error.strerror or str(error)
            if lose:
                self._lose(data[done:])
            return False
        return True

    def _lose(self, lines: bytes) -> None:
        count = lines.count(b"\n") or bool(lines)
        self._untold.write_failed += count
        self.lost.write_failed += count

    def _notice(self) -> bytes:
        lost, why = self._untold, list[str]()
        if lost.too_slow:
            why.append(f"{lost.too_slow} because they were taken too slowly")
        if lost.write_failed:
            why.append(f"{lost.write_failed} because they could not be written ({self._reason})")
        text = self.line_of(f"lines of the log were lost here: {', '.join(why)}")
        return f"{text}\n".encode()


class LogStream(io.TextIOBase):
    """What takes the place of `sys.stderr` or `sys.stdout`. Lines go on when they are whole, or at a flush."""

    def __init__(self, lines: Lines, fd: int) -> None:
        self._lines = lines
        self._fd = fd
        self._part = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "backslashreplace"

    def write(self, text: str, /) -> int:
        with self._lock:
            *whole, self._part = (self._part + text).split("\n")
            for line in whole:
                self._push(f"{line}\n")
            if len(self._part) >= PIECE_BYTES:
                self.flush()
        return len(text)

    def say_what_is_lost(self, line_of: Callable[[str], str]) -> None:
        """Have the thread that writes say it in the form of a log: the line, without its end, of a message."""
        self._lines.line_of = line_of

    def flush(self) -> None:
        """Pass on what has no end yet, such as a bar of progress. Waits for nothing."""
        with self._lock:
            part, self._part = self._part, ""
            if part:
                self._push(part)

    def wait_written(self) -> None:
        """Before a process ends at once: let what waits get out, as far as that goes quickly."""
        self.flush()
        self._lines.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        with contextlib.suppress(OSError):
            return os.isatty(self._fd)
        return False

    def fileno(self) -> int:
        return self._fd

    def _push(self, text: str) -> None:
        self._lines.push(text.encode(self.encoding, self.errors))


def never_wait(*, stdout: bool = False) -> None:
    """From now on nobody in this process waits for standard error, nor for standard output if asked for."""
    sys.stderr = _in_place_of(sys.stderr, 2)
    if stdout:
        sys.stdout = _in_place_of(sys.stdout, 1)


def end_process(status: int) -> NoReturn:
    """End at once, whatever threads are at, but with the last lines of the log."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.wait_written()
    os._exit(status)


def _in_place_of(stream: TextIO, fd: int) -> TextIO:
    if isinstance(stream, LogStream):
        return stream
    lines = Lines(fd)
    output = LogStream(lines, fd)

    atexit.register(output.wait_written)
    return cast("TextIO", output)


def _pieces(lines: deque[bytes]) -> list[bytes]:
    """Whole lines, as many together as go into a pipe at once."""
    pieces: list[bytearray] = []
    for line in lines:
        if pieces and len(pieces[-1]) + len(line) <= PIECE_BYTES:
            pieces[-1] += line
        else:
            pieces.append(bytearray(line))
    return [bytes(piece) for piece in pieces]


def _write_some(fd: int, data: bytes) -> int:
    """Write some of it, however long that takes, also where somebody has made the descriptor non-blocking."""
    while True:
        try:
            return os.write(fd, data)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EWOULDBLOCK}:
                raise
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()

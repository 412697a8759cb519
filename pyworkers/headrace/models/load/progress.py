"""How far a long read or download is: a bar on a terminal, a line per quarter anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["ProgressBar"]

WIDTH = 24
MIN_INTERVAL_S = 0.1  # between two drawings


class ProgressBar:
    """Call it with (bytes done, bytes in all), as `Checkpoint.progress` wants it; then `close` it.

    It says nothing in its first `quiet_s` seconds, so that what is quick stays silent.
    """

    def __init__(self, label: str, stream: TextIO | None = None, *, quiet_s: float = 0.0) -> None:
        self.label = label
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._drawn_at = -MIN_INTERVAL_S
        self._speaks_at = time.monotonic() + quiet_s
        self._quarter = 0
        self._open_line = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() < self._speaks_at:
            return
        share = min(done / total, 1.0) if total else 1.0
        if self._tty:
            now = time.monotonic()
            if now - self._drawn_at < MIN_INTERVAL_S and done < total:
                return
            self._drawn_at = now
            bar = "#" * int(share * WIDTH)
            self._write(f"\r{self.label} [{bar:<{WIDTH}}] {share:4.0%} of {total / 1e6:.0f} MB")
            self._open_line = True
        elif int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            self._write(f"{self.label}: {self._quarter * 25}% of {total / 1e6:.0f} MB\n")

    def close(self) -> None:
        """End the line of the bar."""
        if self._open_line:
            self._write("\n")
            self._open_line = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

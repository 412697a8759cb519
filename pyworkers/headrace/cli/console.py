"""The person before `headrace serve`: the signals that come, and the lines that go."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable


class StopSignals:
    """What the signals asked for: `soon` with the first, `now` with the second.

    With `reload` SIGHUP calls that and ends nothing, unless it says that the terminal is gone.
    """

    def __init__(self, reload: Callable[[], None] | None = None) -> None:
        self.reload = reload
        self._had_terminal = has_terminal()
        self.soon = asyncio.Event()
        self.now = asyncio.Event()
        self.last_signal = 0
        self.numbers = [
            int(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup wants us to go on
        ]
        loop = asyncio.get_running_loop()
        for number in self.numbers:
            loop.add_signal_handler(number, self._on_signal, number)

    @property
    def ending(self) -> list[int]:
        """Those that end this process whatever it is at."""
        return [n for n in self.numbers if n != signal.SIGHUP or self.reload is None]

    def _on_signal(self, number: int) -> None:
        closed = self._had_terminal and not has_terminal()
        if number == signal.SIGHUP and self.reload is not None and not closed:
            self.reload()
            return
        (self.now if self.soon.is_set() else self.soon).set()
        self.last_signal = number


def has_terminal() -> bool:
    """Whether a terminal controls this process. The kernel sends SIGHUP when it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Printer:
    """Lines on stderr, each after the name of the process it is about."""

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names))
        self._colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, name: str, line: str) -> None:
        padded = f"{name:{self._width}}"
        if self._colour:
            padded = f"\x1b[{31 + (sum(name.encode()) % 6)}m{padded}\x1b[0m"
        sys.stderr.write(f"{padded} | {line}\n")

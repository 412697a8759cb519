"""Whether a command takes the flags that a file gives it, without starting it."""

from __future__ import annotations

import re
import subprocess
import sys

STOP = "--no-such-flag"


def refused(*words: str) -> list[str]:
    """The flags that `headrace` refuses, which is only `STOP` where all others are right.

    A command names what it does not know before it does anything: all of it, or the first.
    """
    command = [sys.executable, "-m", "headrace", *words, STOP]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    line = next((line for line in done.stderr.splitlines() if "argument" in line), "")
    return re.findall(r"--[\w-]+", line)

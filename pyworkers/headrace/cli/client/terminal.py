"""What goes to a terminal or a pipe. Text of strangers that would steer it is shown instead of sent; a pipe may end."""

from __future__ import annotations

import contextlib
import os
import re
import sys

# Control characters but line feed and tab, marks that turn the direction of text, and halves of characters.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The same text with, say, an escape as `\x1b` and a right-to-left override as `\u202e`."""
    return _STEERING.sub(lambda found: _named(found[0]), text)


def leave_stdout() -> None:
    """Let what is left of standard output go nowhere: who read it has enough."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _named(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

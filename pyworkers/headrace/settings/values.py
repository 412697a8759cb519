"""Values of flags, from text. A wrong value raises `ArgumentTypeError` with what would be right."""

from __future__ import annotations

import argparse
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

MOST = 2**31 - 1
"""Of a count: more tokens, answers or workers than any machine holds. Kernels index with 32 bits."""

_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class SettingsError(ValueError):
    """A setting cannot be right. The text is one line, for the person who typed it."""


class FlagError(SettingsError):
    """A flag cannot be right, or two cannot be right together. The usage of the command comes before the text."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Reads whole numbers from `least` to `most`."""

    least: int
    most: int = MOST

    def __call__(self, text: str) -> int:
        digits = text.isascii() and text.isdigit() and len(text) <= 20
        if not digits or not self.holds(int(text)):
            raise argparse.ArgumentTypeError(
                f"{shortened(text)} is not a whole number from {self.least} to {self.most}"
            )
        return int(text)

    def holds(self, value: int) -> bool:
        """Whether some text gives this value."""
        return self.least <= value <= self.most


positive = Whole(1)
count = Whole(0)
port_number = Whole(0, 65_535)


def size_bytes(text: str) -> int:
    """`512M`, `1.5GiB` or plain bytes. Units are powers of 1024."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a size; write bytes, or a number with a unit, such as 512M or 1.5GiB"
        )
    size = int(float(match[1]) * _BYTES[match[2].lower()])
    if not 1 <= size < 1 << 63:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a size from 1 byte to 8 million TiB"
        )
    return size


def duration(text: str) -> float:
    """Seconds of `30s`, `2m`, `500ms` or plain seconds, at most an hour."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|m|h)?", text.strip(), re.ASCII)
    value = math.inf if match is None else float(match[1]) * _SECONDS[match[2] or "s"]
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a time; write a number with a unit, such as 30s, 2m or 500ms"
        )
    if value > 3600:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is more than an hour")
    return value


def nonempty(text: str) -> str:
    """Any text but spaces."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; write a name")
    return text


MAX_MODEL_NAMES = 17  # what routers take: the name, and 16 further ones


def model_names(text: str) -> str:
    """Names of one model, with commas between them."""
    names = split_names(text)
    if not all(names):
        raise argparse.ArgumentTypeError("a name is empty; write NAME or NAME,FURTHER_NAME")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("it names one name twice")
    if len(names) > MAX_MODEL_NAMES:
        raise argparse.ArgumentTypeError(
            f"it has {len(names)} names, {MAX_MODEL_NAMES} is the most"
        )
    return text


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def existing_file(text: str) -> Path:
    """A file that is there now, so that a misspelt name is noticed before anything starts."""
    path = Path(text).expanduser()
    if not os.path.isfile(path):  # noqa: PTH113  false for names that are too long; pathlib raises
        raise argparse.ArgumentTypeError(f"there is no file {shortened(text)}")
    return path


def shortened(text: str) -> str:
    """In quotes, and cut where it is long: errors repeat what they refuse."""
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}... ({len(text)} characters)"

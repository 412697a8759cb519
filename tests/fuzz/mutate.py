"""Good inputs, changed a little: what a parser that trusts one length, one offset or one type stumbles over."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

_NUMBERS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 16, 1 << 31, (1 << 32) - 1)
_LARGE = (0, 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WORDS = (b"null", b"-1", b"1e999", b"[]", b"{}", b'""', b"\x00", b"\xff", b"true", b"\\ud800")


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the seeds after one to six changes. The same state of `rng` gives the same bytes."""
    data = bytearray(rng.choice(seeds))
    # Headers are at the beginning: half of the changes are there.
    near = len(data) if rng.random() < 0.5 else min(len(data), 512)
    for _ in range(rng.randint(1, 6)):
        rng.choice(_CHANGES)(data, rng.randrange(near + 1), rng)
    if rng.random() < 0.05:
        other = rng.choice(seeds)
        data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


def _flip(data: bytearray, at: int, rng: random.Random) -> None:
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + 1] = bytes([rng.randrange(256)])


def _u32(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS))


def _u64(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + 8] = struct.pack("<Q", rng.choice(_LARGE))


def _word(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + rng.randint(0, 4)] = rng.choice(_WORDS)


def _cut(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at:]


def _without(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.randint(1, 64)]


def _twice(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = data[at : at + rng.randint(1, 64)]


_CHANGES: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    *(_flip, _byte, _u32, _u64, _word, _word),
    *(_cut, _without, _twice),
)

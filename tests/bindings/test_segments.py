"""Checksums and copies of segments, against zlib and against slices."""

from __future__ import annotations

import mmap
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_the_sum_of_parts_is_that_of_all_bytes(parts: list[bytes]) -> None:
    assert _core.crc32(parts) == zlib.crc32(b"".join(parts))
    assert _core.crc32(parts[1:], _core.crc32(parts[:1])) == zlib.crc32(b"".join(parts))


def test_a_sum_of_other_memory() -> None:
    memory = mmap.mmap(-1, 4096)
    memory[:5] = b"hello"
    views = [memoryview(memory)[:100], np.arange(7, dtype=np.uint8)]
    assert _core.crc32(views) == zlib.crc32(memory[:100] + bytes(range(7)))
    with pytest.raises((ValueError, BufferError)):
        _core.crc32([memoryview(memory)[::2]])
    with pytest.raises(TypeError):
        _core.crc32([1])  # pyright: ignore[reportArgumentType]


@given(
    places=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=16),
    nbytes=st.integers(0, 8),
)
def test_segments_are_copied_as_slices_are(places: list[tuple[int, int]], nbytes: int) -> None:
    source, target = np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)
    expected = target.copy()
    for read, write in places:
        expected[8 * write : 8 * write + nbytes] = source[8 * read : 8 * read + nbytes]
    reads = np.array([8 * read for read, _ in places], np.uint64)
    writes = np.array([8 * write for _, write in places], np.uint64)
    _core.copy_segments(source, reads, target, writes, nbytes)
    assert (target == expected).all()


@given(read=st.integers(0, 9000), write=st.integers(0, 9000), nbytes=st.integers(0, 9000))
def test_a_segment_may_be_copied_onto_itself(read: int, write: int, nbytes: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 18_000, np.uint8)
    expected = memory.copy()
    expected[write : write + nbytes] = memory[read : read + nbytes].copy()
    reads, writes = (np.array([start], np.uint64) for start in (read, write))
    _core.copy_segments(memory, reads, memory, writes, nbytes)
    assert (memory == expected).all()


@pytest.mark.parametrize(
    ("read", "write", "nbytes"),
    [(9, 0, 8), (0, 9, 8), (2**63, 0, 8), (2**64 - 1, 0, 2), (0, 0, 17)],
)
def test_what_does_not_lie_inside_is_not_copied(read: int, write: int, nbytes: int) -> None:
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="inside"):
        _core.copy_segments(
            source,
            np.array([0, read], np.uint64),
            target,
            np.array([0, write], np.uint64),
            nbytes,
        )
    assert not target.any()


def test_the_target_must_be_writable_and_starts_must_match() -> None:
    memory, none = np.zeros(16, np.uint8), np.array([], np.uint64)
    with pytest.raises(ValueError, match="only be read"):
        _core.copy_segments(memory, none, bytes(16), none, 1)
    with pytest.raises(ValueError, match="as many starts"):
        _core.copy_segments(memory, none, memory, np.array([0], np.uint64), 1)

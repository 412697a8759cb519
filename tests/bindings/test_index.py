"""headrace._core.BlockIndex: what it answers, what it takes, and what it says of wrong arguments."""

import array
import random
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace._core import BlockIndex

RNG = random.Random(1)
PROMPT = [RNG.getrandbits(64) for _ in range(768)]


def as_bytes(keys: list[int]) -> Any:
    return struct.pack(f"<{len(keys)}Q", *keys)


def as_array(keys: list[int]) -> Any:
    return array.array("Q", keys)


def as_numpy(keys: list[int]) -> Any:
    return np.array(keys, dtype=np.uint64)


def as_view(keys: list[int]) -> Any:
    return memoryview(as_bytes(keys))


@pytest.mark.parametrize("form", [list, tuple, as_bytes, as_array, as_numpy, as_view])
def test_keys_come_in_every_form(form: Callable[[list[int]], Any]) -> None:
    index = BlockIndex()
    first, second = index.join(1000), index.join(1000)
    assert index.store(first, form(PROMPT[:500])) == 500
    assert index.store(second, form(PROMPT[:77])) == 77
    assert index.overlaps(form(PROMPT)) == [500, 77]
    assert index.overlaps(form([])) == [0, 0]
    assert index.remove(first, form(PROMPT[100:])) == 400
    assert index.overlaps(form(PROMPT)) == [100, 77]
    assert (index.held(first), len(index), index.places) == (100, 100, 2)
    assert index.nbytes > 1600


def test_a_place_that_left_has_no_blocks() -> None:
    index = BlockIndex()
    gone, here = index.join(1000), index.join(1000)
    for place in (gone, here):
        index.store(place, PROMPT)
    index.leave(gone)
    overlaps = index.overlaps(PROMPT)
    assert (overlaps[gone], overlaps[here]) == (0, 768)
    assert index.held(gone) == 0
    assert index.remove(gone, PROMPT) == 0


def test_what_does_not_fit_is_an_error_that_names_the_capacity() -> None:
    index = BlockIndex()
    place = index.join(100)
    with pytest.raises(ValueError, match="100"):
        index.store(place, PROMPT)
    assert index.held(place) == 100
    assert index.overlaps(PROMPT) == [100]


def test_places_that_are_not_there_are_named() -> None:
    index = BlockIndex()
    with pytest.raises(ValueError, match="did not join"):
        index.store(3, PROMPT)
    assert index.remove(3, PROMPT) == 0
    index.leave(3)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (b"1234567", ValueError),
        ([-1], OverflowError),
        ([2**64], OverflowError),
        (["x"], TypeError),
        ("text", TypeError),
        (None, TypeError),
        (np.zeros(3, dtype=np.float64), TypeError),
    ],
)
def test_what_is_no_list_of_keys_is_refused(keys: Any, error: type[Exception]) -> None:
    index = BlockIndex()
    place = index.join(10)
    for call in (index.overlaps, lambda keys: index.store(place, keys)):
        with pytest.raises(error):
            call(keys)
    assert len(index) == 0


def test_threads_take_turns() -> None:
    index = BlockIndex()
    places = [index.join(10_000) for _ in range(4)]

    def work(place: int, keys: Sequence[int]) -> None:
        for _ in range(50):
            index.store(place, keys)
            index.overlaps(keys)
            index.remove(place, keys[10:])

    threads = [threading.Thread(target=work, args=(place, PROMPT)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.overlaps(PROMPT) == [10] * 4

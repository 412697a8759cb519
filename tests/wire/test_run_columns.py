"""Stored blocks in columns are, in a frame, what a list of them is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import MalformedFrame
from headrace.wire.codec import decode, encode
from headrace.wire.frames import Blocks, StoredRun
from headrace.wire.run_columns import SingleRuns

numbers = st.one_of(st.integers(0, 2**32 + 1), st.integers(2**32, 2**64 - 1))


def blocks(stored: list[StoredRun] | SingleRuns) -> Blocks:
    return Blocks(1, 2**63, stored, bytes(8), False, 0)


def columns(pairs: list[tuple[int, int]]) -> SingleRuns:
    parents, keys = zip(*pairs, strict=True) if pairs else ((), ())
    return SingleRuns(np.array(parents, dtype=np.uint64), np.array(keys, dtype=np.uint64))


@given(pairs=st.lists(st.tuples(numbers, numbers), max_size=20))
def test_columns_are_the_bytes_of_a_list(pairs: list[tuple[int, int]]) -> None:
    listed = [StoredRun(parent, key.to_bytes(8, "little")) for parent, key in pairs]
    assert columns(pairs) == listed == [*columns(pairs)]
    body = encode(blocks(columns(pairs)))
    assert body == encode(blocks(listed))
    assert decode(body) == blocks(listed)


@pytest.mark.parametrize("count", [15, 16, 65_535, 65_536])
def test_many_runs_have_the_header_of_their_number(count: int) -> None:
    parents = np.arange(count, dtype=np.uint64) + np.uint64(2**40)
    runs = SingleRuns(parents, parents)
    assert encode(blocks(runs)) == encode(blocks([*runs]))


def test_what_is_neither_list_nor_columns_is_named() -> None:
    with pytest.raises(MalformedFrame, match=r"blocks\.stored"):
        encode(blocks("no list"))  # type: ignore[arg-type]

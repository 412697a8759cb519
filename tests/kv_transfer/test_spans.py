"""Many pieces as one run of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv_transfer.backends.spans import IOV_MAX, Spans


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=12), st.data())
def test_what_lies_between_is_what_lies_between(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    spans = Spans([memoryview(part) for part in parts])
    assert spans.size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(0, len(whole)))
    between = spans.between(start, stop)
    assert b"".join(between) == whole[start:stop]
    assert all(len(view) for view in between)
    spans.at = start
    assert b"".join(spans.rest()) == whole[start:]


@given(st.integers(0, 3 * IOV_MAX), st.integers(1, 9))
def test_one_call_takes_so_many_and_no_more(start: int, length: int) -> None:
    spans = Spans([memoryview(b"x")] * (3 * IOV_MAX))
    stop = min(start + length, spans.size)
    assert len(spans.between(start, stop)) == stop - start
    spans.at = start
    assert len(spans.rest()) == min(IOV_MAX, 3 * IOV_MAX - start)

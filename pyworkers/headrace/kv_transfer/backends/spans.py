"""Many pieces of memory as one run of bytes, with a place in it. A frame may have thousands: no loop is in Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

IOV_MAX: Final = 1024  # of Linux, in one call


class Spans:
    """`views` one after the other; `at` is the first byte that has not been sent, or filled."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ends = list(accumulate(map(len, views)))  # after each view
        self.at = 0
        self.size = self._ends[-1] if views else 0

    def rest(self) -> list[memoryview]:
        """What is left, as far as one call takes it; empty at the end, and no view of it is."""
        return self.between(self.at, self.size)

    def between(self, start: int, stop: int) -> list[memoryview]:
        """These bytes, as far as one call takes them."""
        if start >= stop:
            return []
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        views = list(self._views[first : min(last + 1, first + IOV_MAX)])
        if last < first + IOV_MAX:  # before the front is cut, in case they are one
            views[-1] = views[-1][: stop - self._ends[last] + len(views[-1])]
        views[0] = views[0][start - (self._ends[first - 1] if first else 0) :]
        return views

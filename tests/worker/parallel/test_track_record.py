"""Predicted savings are believed as far as the last ones came true."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.parallel.track_record import Expected, TrackRecord

EVEN = np.array([[50.0, 50.0], [50.0, 50.0]])


def seconds(of_first: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The busiest rank of the first layer takes so long for each row of the group."""
    return np.array([[100 * of_first, 0.0], [7.0, 7.0]])


@pytest.mark.parametrize(
    ("after_s", "came_true"), [(0.6, 1.0), (0.4, 1.0), (0.8, 0.5), (1.0, 0.0), (1.3, 0.0)]
)
def test_what_came_true_is_the_saved_part_of_what_was_hoped_for(
    after_s: float, came_true: float
) -> None:
    record = TrackRecord()
    record.changed({0: Expected(before_s=1.0, saved_s=0.4)})
    assert record.window(EVEN, seconds(9.0)) is None  # experts were on their way in it
    assert record.window(EVEN, seconds(after_s)) is None and record.open
    assert record.window(EVEN, seconds(after_s)) == pytest.approx(came_true)
    assert record.trust == pytest.approx((1 + came_true) / 2)
    assert not record.open
    assert record.window(EVEN, seconds(after_s)) is None


def test_trust_comes_back_with_what_comes_true() -> None:
    record = TrackRecord()
    found: list[float] = []
    for after_s in (1.0, 1.0, 0.6, 0.6):
        record.changed({0: Expected(before_s=1.0, saved_s=0.4)})
        for _ in range(3):
            record.window(EVEN, seconds(after_s))
        found.append(record.trust)
    assert found == [0.5, 0.25, 0.625, 0.8125]


def test_windows_without_rows_tell_nothing() -> None:
    record = TrackRecord()
    record.changed({0: Expected(before_s=1.0, saved_s=0.4)})
    for _ in range(9):
        assert record.window(np.zeros((2, 2)), seconds(0.0)) is None
    assert record.open and record.trust == 1.0


def test_a_change_that_was_given_up_is_forgotten() -> None:
    record = TrackRecord()
    record.changed({0: Expected(before_s=1.0, saved_s=0.4)})
    record.forget()
    assert not record.open
    assert record.window(EVEN, seconds(1.0)) is None and record.trust == 1.0

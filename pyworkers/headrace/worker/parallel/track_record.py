"""What moves of experts were predicted to save, and what they did: predictions that were too good are believed less.

Prices are measured between ranks. Where ranks get into each other's way, as on the cores of one machine, evening them
out saves less than these prices say. So after a change the busiest rank's seconds for a row are compared with those
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOOKED_AT = 2  # windows, after one in which experts were still on their way. A guess

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """Of a layer that changes: seconds that its busiest rank takes for each row of the group."""

    before_s: float
    saved_s: float


class TrackRecord:
    """The same on all ranks, as all of it comes from what all ranks said."""

    def __init__(self) -> None:
        self.trust = 1.0  # the part of a predicted gain that is counted on
        self._expected: Mapping[int, Expected] = {}
        self._windows: list[Floats] = []  # seconds for a row of each layer

    @property
    def open(self) -> bool:
        """It is not yet known what the last change gave."""
        return bool(self._expected)

    def changed(self, expected: Mapping[int, Expected]) -> None:
        """These layers are changed from now on."""
        self._expected, self._windows = dict(expected), []

    def forget(self) -> None:
        """The last change did not come to its end."""
        self._expected = {}

    def window(self, rows: Floats, seconds: Floats) -> float | None:
        """A window, `rows` and `seconds` `[layers, ranks]`. The part that came true, once that is known."""
        if not self.open:
            return None
        of_layer = rows.sum(1)
        if all(of_layer[layer] > 0 for layer in self._expected):
            self._windows.append(seconds.max(1) / np.maximum(of_layer, 1))
        if len(self._windows) <= LOOKED_AT:
            return None
        after = np.mean(self._windows[1:], axis=0)
        saved = sum(one.before_s - float(after[layer]) for layer, one in self._expected.items())
        hoped = sum(one.saved_s for one in self._expected.values())
        came_true = min(1.0, max(0.0, saved / hoped)) if hoped > 0 else 1.0
        self.trust = (self.trust + came_true) / 2
        self._expected = {}
        return came_true

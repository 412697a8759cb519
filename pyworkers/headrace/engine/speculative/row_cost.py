"""What the rows of a step cost on this machine, as its steps tell."""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from numpy.typing import NDArray

FADE = 0.97  # of a step's weight in the costs, from step to step
LEAST_MS = 1e-6  # of a step, whatever the clock shows
OUTLIER = 3.0  # times the expected ms: what is above it was something else
# The first guess of what a row costs is off by so much of a row's part of a step, and the cost changes in each by that.
FIRST_DOUBT = 1 / 3
DOUBT = 1 / 128
FIRST_NOISE = 0.05  # by which neighbours differ, as a share of a step
# These are guesses.


class RowCost:
    """`ms = fixed + each * rows`, from one step after another.

    What a row costs is learnt from neighbours that differ in rows: both met the machine in the same state, so a machine
    that gets slower does not look like rows that cost much. How far such a pair is believed depends on how much
    neighbours differ anyway (a Kalman filter of one number). How fast the machine is, which scales both numbers, every
    step tells. Until the number of rows has changed, `each` is a guess, or `share` of a row's part of the first step.
    """

    def __init__(self, share: float, each: float = 0.0) -> None:
        self.fixed = 0.0
        self.each = each
        self._share = share
        self._weight = 0.0  # of all steps so far
        self._mean_rows = 0.0
        self._rows = self._ms = 0.0  # of the last step
        self._doubt = 0.0  # variance of `each`
        self._noise = 0.0  # variance of the ms between neighbours

    def note(self, rows: int, ms: float) -> None:
        """So many rows took so long."""
        ms = max(ms, LEAST_MS)
        if self._weight == 0:
            self.each = min(self.each or ms / rows * self._share, ms / rows)
            self.fixed = ms - self.each * rows
            self._doubt = (FIRST_DOUBT * ms / rows) ** 2
            self._noise = (FIRST_NOISE * ms) ** 2
        else:
            if self._weight > 4:
                ms = min(ms, OUTLIER * self.at(rows))
            self._compare(rows - self._rows, ms - self._ms)
        self._weight = self._weight * FADE + 1
        self._mean_rows += (rows - self._mean_rows) / self._weight
        slower = 1 + (ms / self.at(rows) - 1) / self._weight
        self.fixed *= slower
        self.each *= slower
        self._rows, self._ms = rows, ms

    def _compare(self, more_rows: float, more_ms: float) -> None:
        """So many rows more took so much longer: turn the line about the point that all steps have told."""
        level = self.at(self._mean_rows)
        unit = level / self._mean_rows
        off = more_ms - self.each * more_rows
        self._doubt += (DOUBT * unit) ** 2
        if more_rows:
            gain = self._doubt * more_rows / (self._doubt * more_rows**2 + self._noise)
            self._doubt *= max(1 - gain * more_rows, 0.0)
            self.each = min(max(self.each + gain * off, 0.0), unit)
            self.fixed = level - self.each * self._mean_rows
        self._noise += (off * off - self._noise) / (self._weight + 1)

    @property
    def doubt(self) -> float:
        """By how many ms `each` may be off: one standard deviation."""
        return math.sqrt(self._doubt)

    @overload
    def at(self, rows: float) -> float: ...
    @overload
    def at(self, rows: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def at(self, rows: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        """Ms that a step of so many rows is expected to take."""
        return self.fixed + self.each * rows

"""How often drafts are right: by sequence and depth, and by how sure the drafting layer was of them.

A rate is an average that fades, begun with that of sequences before; where nothing is drafted at a depth, it slowly
follows the depth before. The probability that the layer gave a draft tells more of that one: a draft of 0.9 is right
about nine times in ten. By how much that is off for this model, the drafts themselves tell, level by level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RATE = 0.6  # chance of a draft before anything is known; a guess
# Of the newest draft of a sequence in its rate. At 1 / 12, rates of 0.5 now and then looked like 0.25, where drafting
# does not pay; after those, as many drafts as ever were right.
RATE_WEIGHT = 1 / 32
# The same where none was made at a depth, of the deepest one that was: if that goes well, a deeper one is worth a try.
DEEPER_WEIGHT = RATE_WEIGHT / 4
PRIOR_WEIGHT = 1 / 8  # of a sequence in the rate that the next ones begin with
FORGET_WEIGHT = 1 / 256  # of a step without drafts: how far the rate goes back to that
LEVELS = 8  # of probability
LEVEL_WEIGHT = 1 / 64  # of a draft in the rate of its level
UNKNOWN = -1  # instead of a level
# These are guesses.


class Acceptance:
    """Of the running sequences by batch row, at `most` drafts for each."""

    def __init__(self, most: int, max_sequences: int) -> None:
        self.rates = np.full((max_sequences, most), RATE)
        self._prior = np.full(most, RATE)
        self._placed = np.zeros(max_sequences, dtype=np.bool_)  # by anybody so far
        self._levels = np.full((max_sequences, most), UNKNOWN)
        self._drawn = False  # levels may be known
        self._chances = np.ones(max_sequences)  # that all drafts so far are right
        self._of_level = (np.arange(LEVELS) + 0.5) / LEVELS
        # What follows from so many drafts of which so many were right, depth by depth: [drafted, accepted, most].
        drafted, accepted, depth = np.ogrid[: most + 1, : most + 1, :most]
        self._looked = (depth < drafted) & (depth <= accepted)
        deeper = (depth >= drafted) & (drafted > 0) & (accepted >= drafted - 1)
        self._weights = np.where(self._looked, RATE_WEIGHT, np.where(deeper, DEEPER_WEIGHT, 0))
        self._right = np.where(depth < drafted, depth < accepted, drafted == accepted)

    def take_row(self, batch_row: int) -> None:
        """Another sequence has this batch row."""
        if self._placed[batch_row]:
            self._prior += PRIOR_WEIGHT * (self.rates[batch_row] - self._prior)
        self._placed[batch_row] = True
        self.rates[batch_row] = self._prior
        self._levels[batch_row] = UNKNOWN

    def rested(self, batch_rows: NDArray[np.int64], steps: int) -> None:
        """They did not draft for so many steps: what was known of them is not true for ever."""
        rates = self.rates[batch_rows]
        self.rates[batch_rows] = rates + min(FORGET_WEIGHT * steps, 1) * (self._prior - rates)

    def drawn(
        self, batch_rows: NDArray[np.int64], depth: int, probability: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Each has a draft at this depth, from 1, to which the layer gave this probability.

        Returns the chance that it is right, and all before it.
        """
        levels = np.minimum((probability * LEVELS).astype(np.int64), LEVELS - 1)
        if depth == 1:
            self._levels[batch_rows] = UNKNOWN
            self._chances[batch_rows] = 1
        self._levels[batch_rows, depth - 1] = levels
        self._drawn = True
        chances = self._chances[batch_rows] * self._of_level[levels]
        self._chances[batch_rows] = chances
        return chances

    def checked(
        self, batch_rows: NDArray[np.int64], drafted: NDArray[np.int64], accepted: NDArray[np.int64]
    ) -> None:
        """So many drafts of each were looked at, and so many were right."""
        right = self._right[drafted, accepted]
        rates = self.rates[batch_rows]
        self.rates[batch_rows] = rates + self._weights[drafted, accepted] * (right - rates)
        if not self._drawn:
            return
        self._drawn = False
        levels = self._levels[batch_rows]
        known = self._looked[drafted, accepted] & (levels != UNKNOWN)
        if known.any():
            counts = np.bincount(levels[known], minlength=LEVELS)
            surplus = np.bincount(levels[known], right[known], LEVELS) - counts * self._of_level
            weights = 1 - (1 - LEVEL_WEIGHT) ** counts
            self._of_level += weights * surplus / np.maximum(counts, 1)
            self._levels[batch_rows] = UNKNOWN

"""Logits of a step, wherever they are: what sampling does that looks at whole rows of them.

On the host they are an array of numpy, and most of it is Rust; on a device they are a tensor. Both ways work with
bounds that hold for certain, rounding included, and leave a few tokens of each row, which are then compared exactly, in
float64 on the host. So batch mates may move a bound, never a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SLACK = 1e-4  # relative; far above the rounding of float32, far below what would cost time


@dataclass(slots=True)
class Candidates:
    """Tokens of some rows, most probable first; on a tie the lowest id first."""

    ids: NDArray[np.int64]  # [rows, most]
    logits: NDArray[np.float64]  # [rows, most], -inf behind the last one


@dataclass(slots=True)
class Draws:
    """How to draw a token for each of some rows. All fields are `[rows]`."""

    best: NDArray[np.float32]  # the highest logit
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    key: NDArray[np.uint32]
    key2: NDArray[np.uint32]

    def of(self, rows: NDArray[np.int64] | slice) -> Draws:
        return Draws(
            self.best[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.key[rows],
            self.key2[rows],
        )


@dataclass(slots=True)
class Few:
    """Of rows of logits on the host: which tokens alone may be chosen, where they are few enough to list them."""

    of: NDArray[np.int64]  # [rows], place in `starts`, -1 where all tokens may be chosen
    starts: NDArray[np.int64]  # [lists + 1], places in `ids`
    ids: NDArray[np.uint32]  # ascending in each list

    def of_rows(self, rows: NDArray[np.int64]) -> Few:
        return Few(self.of[rows], self.starts, self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What requests change in logits, kind after kind in this order. Places count through all rows."""

    added: tuple[NDArray[np.int64], NDArray[np.float32]]
    # With the factor of repetition, and what is subtracted then.
    penalised: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]
    forbidden: NDArray[np.int64]
    kept: list[tuple[int, NDArray[np.int64]]]  # a row, and the columns that alone stay in it


class TokenIds:
    """The token of each column of logits, ascending."""

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids
        self.on_device: Any = None  # a copy that `DeviceLogits` keeps


class Logits(Protocol):
    """Float32, `[rows, columns]`."""

    on_host: bool
    rows: int
    columns: int

    def take(self, rows: NDArray[np.int64], *, copy: bool = False) -> Logits:
        """Some rows, in ascending order; those that stand together without a copy unless one is asked for."""
        ...

    def part(self, start: int, stop: int) -> Logits:
        """Rows that stand together, without a copy."""
        ...

    def values(self) -> NDArray[np.float32]:
        """All of them on the host, to be read."""
        ...

    def at(self, columns: NDArray[np.int64]) -> NDArray[np.float32]:
        """That of one column of each row."""
        ...

    def argmax(self, few: Few | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Best column of each row, on a tie the lowest, and its logit. A NaN counts as best.

        There is no `few` but on the host.
        """
        ...

    def log_total(self, best: NDArray[np.float32]) -> NDArray[np.float64]:
        """`log(sum(exp(logits - best)))` of each row, summed the same way however many rows there are."""
        ...

    def probability(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Of one column of each of some rows, nearly; 0 where the row has a NaN."""
        ...

    def highest(self, k: NDArray[np.int64]) -> Candidates:
        """At least the `k` most probable columns of each row, and few more. `1 <= k <= columns`."""
        ...

    def race(self, draws: Draws, tokens: TokenIds, few: Few | None = None) -> NDArray[np.int64]:
        """Draw one token of each row by the exponential race, under top-p and min-p, but not top-k.

        A row with `few` is drawn as if all other columns were -inf. With v the noise in (0, 1) and w a token's weight,
        its time is -log(1 - v) / w; the first one wins. Where the winner is not in the top-p set, nothing less probable
        is, and the race goes on without them: no row is ever sorted.
        """
        ...

    def edit(self, edits: Edits) -> None:
        """In place."""
        ...

    def mask(self, rows: NDArray[np.int64], masks: NDArray[np.uint32]) -> None:
        """What the mask of a row does not allow becomes -inf, in place."""
        ...


def stand_together(rows: NDArray[np.int64]) -> bool:
    """Of rows in ascending order."""
    return len(rows) > 0 and bool(rows[-1] - rows[0] + 1 == len(rows))

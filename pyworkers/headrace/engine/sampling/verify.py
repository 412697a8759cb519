"""Which drafts were right, and so how many tokens a step gives each sequence.

A draft counts if it is the very token that was sampled at its place, each place with its own noise. So the text is the
one that would have come without drafts, however they were made and however many there were. The other way, which may
give another text of the same distribution, is `rejection.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace.engine.sampling.sampler import Rows
from headrace.engine.sequence import Sequence
from headrace.engine.step.input_batch import Ends
from headrace.engine.step.row_counts import Ints
from headrace.engine.step.work import StepWork
from headrace.wire.frames import Finish, TokenLogprob

GOES_ON: Final = 0
STOP: Final = 1
LENGTH: Final = 2
FINISHES: Final[list[Finish | None]] = [None, "stop", "length"]


class Chosen(NamedTuple):
    """The tokens that a step gives a sequence; none where the logits were not finite."""

    sequence: Sequence
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish: Finish | None
    drafted: int
    accepted: int  # how many of `ids` were drafts
    stuck: str | None = None  # why there is no token, where no token may go on


@dataclass(slots=True)
class ChosenRows:
    """The fields of `Chosen`, of all sequences that got a token: all `[rows]`, but for `ids`."""

    work: StepWork
    places: Ints  # in `work`, ascending
    ids: Ints  # `counts` of each row, row after row
    counts: Ints
    finish: NDArray[np.int8]  # place in `FINISHES`
    drafted: Ints
    accepted: Ints
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict[int, list[TokenLogprob]])
    stuck: dict[int, str] = field(default_factory=dict[int, str])
    put_off: frozenset[int] = frozenset()  # rows without a token, which get one in a later step

    @staticmethod
    def none(work: StepWork) -> ChosenRows:
        ints = np.zeros(0, dtype=np.int64)
        return ChosenRows(work, ints, ints, ints, ints.astype(np.int8), ints, ints)

    def __len__(self) -> int:
        return len(self.places)

    def row(self, row: int) -> Chosen:
        stop = int(self.counts[: row + 1].sum())
        return Chosen(
            self.work.sequence(self.places[row]),
            self.ids[stop - self.counts[row] : stop].tolist(),
            self.logprobs.get(row),
            FINISHES[self.finish[row]],
            int(self.drafted[row]),
            int(self.accepted[row]),
            self.stuck.get(row),
        )

    def __iter__(self) -> Iterator[Chosen]:
        return (self.row(row) for row in range(len(self)))


def choose(
    work: StepWork, places: Ints, rows: Rows, ends: Ends, ids: NDArray[np.int64]
) -> ChosenRows:
    """The tokens of each sequence, those at `places` of `work`, that count, up to where its answer ends.

    Those count that equal the next row's draft, and the one after them. None where the first of `ids` is -1; such a
    token ends the run before it otherwise.
    """
    _, columns = _core.cut_answers(
        ids,
        rows=rows.counts,
        drafts=rows.drafts,
        totals=rows.totals,
        limits=ends.limits,
        stops=ends.stops,
        more_stops=ends.more_stops,
    )
    return ChosenRows(work, places, *columns)

"""What the sequences of a step get of it: one by one (`Work`), and in columns (`StepWork`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sequence import Sequence
from headrace.engine.step.row_counts import Ints, RowCounts

Flags = NDArray[np.bool_]


@dataclass(slots=True)
class Work:
    """The next `count` tokens of `sequence`, and at most so many of its `drafts`.

    What the sequence may have changed by when the step runs is kept here.
    """

    sequence: Sequence
    batch_row: int
    epoch: int  # of the batch row
    start: int  # its first token's place, or more where drafts were accepted
    count: int
    drafts: int
    begins: bool  # it came with all its KV: draft for it first
    decodes: bool  # its newest token is all that is left to compute
    chooses: bool  # a token after these
    scores: bool  # tokens of the prompt, or pools them

    @staticmethod
    def of(sequence: Sequence, count: int, columns: RowCounts) -> Work:
        batch_row, start, length = sequence.batch_row, sequence.reached, sequence.length
        assert batch_row is not None
        return Work(
            sequence,
            batch_row,
            columns.epoch.item(batch_row),
            start,
            count,
            drafts=0,
            begins=False,
            decodes=length > sequence.prompt_len and start + 1 == length,
            chooses=start + count == length < sequence.limit,
            scores=_scores(sequence, start),
        )


@dataclass(slots=True)
class StepWork:
    """The fields of `Work`, all `[work]`."""

    sequences: NDArray[np.object_]
    batch_rows: Ints
    epochs: Ints
    starts: Ints
    counts: Ints
    drafts: Ints
    begins: Flags
    decodes: Flags
    chooses: Flags
    scores: Flags

    @staticmethod
    def decoding(batch_rows: Ints, drafts: Ints, columns: RowCounts) -> StepWork:
        """One token each of sequences with nothing else left to compute, and `drafts`."""
        epochs, starts, counts, decodes, chooses, special = columns.core.decoding(batch_rows)
        begins = np.zeros(len(batch_rows), dtype=np.bool_)
        scores = begins
        if special:
            scores = begins.copy()
            for place in special:
                scores[place] = _scores(columns.at(batch_rows[place]), starts.item(place))
        return StepWork(
            columns.sequences_at(batch_rows),
            batch_rows,
            epochs,
            starts,
            counts,
            drafts,
            begins=begins,
            decodes=decodes,
            chooses=chooses,
            scores=scores,
        )

    @staticmethod
    def listed(work: list[Work]) -> StepWork:
        sequences = np.empty(len(work), dtype=np.object_)
        sequences[:] = [item.sequence for item in work]
        return StepWork(
            sequences,
            _ints([item.batch_row for item in work]),
            _ints([item.epoch for item in work]),
            _ints([item.start for item in work]),
            _ints([item.count for item in work]),
            _ints([item.drafts for item in work]),
            _flags([item.begins for item in work]),
            _flags([item.decodes for item in work]),
            _flags([item.chooses for item in work]),
            _flags([item.scores for item in work]),
        )

    def then(self, more: StepWork) -> StepWork:
        """These, and `more` after them."""
        if not len(self) or not len(more):
            return self if len(self) else more
        both = zip(self._fields(), more._fields(), strict=True)
        return StepWork(*[np.concatenate(pair) for pair in both])

    def where(self, mask: Flags) -> StepWork:
        if mask.all():
            return self
        return StepWork(*[field[mask] for field in self._fields()])

    def _fields(self) -> tuple[NDArray[Any], ...]:
        return (
            self.sequences,
            self.batch_rows,
            self.epochs,
            self.starts,
            self.counts,
            self.drafts,
            self.begins,
            self.decodes,
            self.chooses,
            self.scores,
        )

    def __len__(self) -> int:
        return len(self.batch_rows)

    def __getitem__(self, place: int) -> Work:
        return Work(*[field.item(place) for field in self._fields()])

    def __iter__(self) -> Iterator[Work]:
        return (self[place] for place in range(len(self)))

    def sequence(self, place: int | np.int64) -> Sequence:
        return self.sequences.item(place)

    def sequences_at(self, places: Ints) -> NDArray[np.object_]:
        """Those at `places`, which ascend."""
        return self.sequences if len(places) == len(self) else self.sequences[places]


def _scores(sequence: Sequence, start: int) -> bool:
    wanted = sequence.prompt_logprobs is not None or sequence.pooled is not None
    return wanted and start < sequence.prompt_len


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _flags(values: list[bool]) -> Flags:
    return np.array(values, dtype=np.bool_)

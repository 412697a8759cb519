"""Rows of logits for sequences that no step has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling.sampler import Rows, Sampler
from headrace.engine.sequence import Sequence


def rows_of(
    sequences: list[Sequence], counts: NDArray[np.int64], drafts: NDArray[np.int32]
) -> Rows:
    """`counts[i]` rows of `sequences[i]`, which has a batch row, all but the first on `drafts`."""
    batch_rows = np.array([sequence.batch_row for sequence in sequences])
    totals = np.array([sequence.total for sequence in sequences])
    return Rows(sequences, batch_rows, totals, counts, drafts)


def one_each(sequences: list[Sequence]) -> Rows:
    """The next position of each sequence."""
    count = len(sequences)
    return rows_of(sequences, np.ones(count, np.int64), np.zeros(count, np.int32))


def take_row(sampler: Sampler, sequence: Sequence) -> None:
    assert sequence.batch_row is not None
    sampler.take_row(sequence, sequence.batch_row)

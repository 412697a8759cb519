"""What a request changes about logits before a token is chosen: bias, penalties, stop tokens that come too early, and
tokens that it forbids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling.logits import Edits, Logits
from headrace.engine.sequence import Sequence


class Context(NamedTuple):
    """A sequence, how many tokens of it are generated, and drafts that count as generated after them."""

    sequence: Sequence
    generated: int
    drafts: list[int]


def edit(
    logits: Logits,
    rows: NDArray[np.int64],
    contexts: list[Context],
    columns: NDArray[np.int64] | None = None,
) -> None:
    """Change `rows` of `logits`, one for each of `contexts`, in place.

    `columns` has the column of each token, -1 for none; without it the columns are the tokens.
    """
    added, penalised, forbidden = _Places(columns, 1), _Places(columns, 2), _Places(columns, 0)
    kept: list[tuple[int, NDArray[np.int64]]] = []
    for row, (sequence, generated, drafts) in zip(rows.tolist(), contexts, strict=True):
        sampling, start = sequence.sampling, row * logits.columns
        if bias := sampling.logit_bias:
            pairs = np.array(bias)
            added.find(start, pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.float32))
        if sequence.penalties is not None:
            ids, counts = sequence.penalties.after(drafts)
            frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
            subtract = np.float32(frequency) * counts + np.float32(presence) * (counts > 0)
            repetition = np.full(len(ids), sampling.repetition_penalty, np.float32)
            penalised.find(start, ids, repetition, subtract)
        stops = sequence.stop_ids
        if stops and generated + len(drafts) < sampling.min_tokens:
            forbidden.find(start, np.fromiter(stops, np.int64, len(stops)))
        if (limits := sequence.limits) is not None:
            forbidden.find(start, limits.banned_after(drafts))
            if len(allowed := _columns_of(limits.allowed, columns)):  # or else all of them stay
                kept.append((row, allowed))
    logits.edit(
        Edits(
            added=added.joined(),
            penalised=penalised.joined(),
            forbidden=forbidden.joined()[0],
            kept=kept,
        )
    )


def _columns_of(tokens: NDArray[np.int64], columns: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Of those that have one."""
    if columns is None:
        return tokens
    found = columns[tokens]
    return found[found >= 0]


class _Places:
    """Gathers the places of one kind of edit, each with some values."""

    def __init__(self, columns: NDArray[np.int64] | None, values: int) -> None:
        self._columns = columns
        self._index: list[NDArray[np.int64]] = []
        self._values: list[list[NDArray[np.float32]]] = [[] for _ in range(values)]

    def find(self, start: int, tokens: NDArray[np.int64], *values: NDArray[np.float32]) -> None:
        """`tokens` of the row that begins at `start`, each with its values."""
        if self._columns is not None:
            found = self._columns[tokens]
            here = found >= 0
            tokens, values = found[here], tuple(value[here] for value in values)
        if len(tokens):
            self._index.append(start + tokens)
            for column, value in zip(self._values, values, strict=True):
                column.append(value)

    def joined(self) -> Any:
        """The places, then each kind of values."""
        if not self._index:
            return np.zeros(0, np.int64), *(np.zeros(0, np.float32) for _ in self._values)
        return np.concatenate(self._index), *(np.concatenate(column) for column in self._values)

"""What a request changes about logits before a token is chosen: bias, penalties, stop tokens that come too early, and
tokens that it forbids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.sequence import Sequence


class Context(NamedTuple):
    """A sequence, how many tokens of it are generated, and drafts that count as generated after them."""

    sequence: Sequence
    generated: int
    drafts: list[int]


def edit(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    contexts: list[Context],
    columns: NDArray[np.int64] | None = None,
) -> None:
    """Change `rows` of `logits`, one for each of `contexts`, in place.

    `columns` has the column of each token, -1 for none; without it the columns are the tokens.
    """
    edits = _Edits(logits, columns)
    places = (rows * logits.shape[1]).tolist()
    for place, (sequence, _, _) in zip(places, contexts, strict=True):
        if bias := sequence.sampling.logit_bias:
            pairs = np.array(bias)
            edits.find(place, pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.float32))
    edits.add()
    for place, (sequence, _, drafts) in zip(places, contexts, strict=True):
        if sequence.penalties is not None:
            ids, counts = sequence.penalties.after(drafts)
            s = sequence.sampling
            subtract = np.float32(s.frequency_penalty) * counts + np.float32(s.presence_penalty) * (
                counts > 0
            )
            repetition = np.full(len(ids), s.repetition_penalty, np.float32)
            edits.find(place, ids, repetition, subtract)
    edits.penalise()
    for place, (sequence, generated, drafts) in zip(places, contexts, strict=True):
        stops = sequence.stop_ids
        if stops and generated + len(drafts) < sequence.sampling.min_tokens:
            edits.find(place, np.fromiter(stops, np.int64, len(stops)))
        if (limits := sequence.limits) is not None:
            banned = limits.banned_after(drafts)
            if len(banned):
                edits.find(place, banned)
    edits.mask()
    for place, (sequence, _, _) in zip(places, contexts, strict=True):
        if sequence.limits is not None and len(sequence.limits.allowed):
            edits.keep(place, sequence.limits.allowed)


class _Edits:
    """Gathers the places of one kind of edit, then does it to all of them at once."""

    def __init__(self, logits: torch.Tensor, columns: NDArray[np.int64] | None) -> None:
        self._flat = logits.view(-1)
        self._width = logits.shape[1]
        self._columns = columns
        self._index: list[NDArray[np.int64]] = []
        self._values: list[tuple[NDArray[np.float32], ...]] = []

    def find(self, place: int, tokens: NDArray[np.int64], *values: NDArray[np.float32]) -> None:
        """`tokens` of the row that begins at `place`, each with its values."""
        if self._columns is not None:
            found = self._columns[tokens]
            here = found >= 0
            tokens, values = found[here], tuple(value[here] for value in values)
        if len(tokens):
            self._index.append(place + tokens)
            self._values.append(values)

    def add(self) -> None:
        if self._index:
            index, (amount,) = self._take()
            self._flat.index_add_(0, index, amount)

    def penalise(self) -> None:
        if self._index:
            index, (repetition, subtract) = self._take()
            seen = self._flat[index]
            seen = torch.where(seen > 0, seen / repetition, seen * repetition)
            self._flat[index] = seen - subtract

    def mask(self) -> None:
        if self._index:
            index, _ = self._take()
            self._flat[index] = -math.inf

    def keep(self, place: int, tokens: NDArray[np.int64]) -> None:
        """Of the row that begins at `place` only `tokens`; all where it has a column for none of them."""
        if self._columns is not None:
            tokens = self._columns[tokens]
            tokens = tokens[tokens >= 0]
        if not len(tokens):
            return
        row = self._flat[place : place + self._width]
        index = torch.from_numpy(tokens).to(row.device)
        kept = row[index]
        row.fill_(-math.inf)
        row[index] = kept

    def _take(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        device = self._flat.device
        index = torch.from_numpy(np.concatenate(self._index)).to(device)
        parts = zip(*self._values, strict=True)
        values = [torch.from_numpy(np.concatenate(part)).to(device) for part in parts]
        self._index, self._values = [], []
        return index, values

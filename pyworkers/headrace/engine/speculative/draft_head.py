"""Which tokens the columns of draft logits stand for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.sampling.logits import TokenIds


class DraftHead:
    """The whole vocabulary, or a part of it: what is drafted is checked, so a part costs only guesses."""

    def __init__(self, vocab_size: int, token_ids: NDArray[np.int32] | None) -> None:
        """Raises `ValueError` unless `token_ids` are ascending and in the vocabulary."""
        self.columns: NDArray[np.int64] | None = None  # of each token, -1 for none; None: itself
        if token_ids is None:
            self.ids = np.arange(vocab_size, dtype=np.int64)
        else:
            self.ids = token_ids.astype(np.int64)
            rising = len(self.ids) > 0 and bool((np.diff(self.ids) > 0).all())
            if not rising or self.ids[0] < 0 or self.ids[-1] >= vocab_size:
                raise ValueError(
                    f"the {len(self.ids)} tokens of the draft head are no ascending ids of a vocabulary of {vocab_size}"
                )
            self.columns = np.full(vocab_size, -1, dtype=np.int64)
            self.columns[self.ids] = np.arange(len(self.ids))
        self.tokens = TokenIds(self.ids.astype(np.int32))

    def ids_of(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        return columns if self.columns is None else self.ids[columns]

    def columns_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of tokens that were drafted."""
        return ids if self.columns is None else self.columns[ids]

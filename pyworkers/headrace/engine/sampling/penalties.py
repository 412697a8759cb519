"""How often each token stands in a request, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Penalties:
    """The distinct tokens of one request, each with its count in the answer.

    Prompt tokens are there, with count 0, only where `with_prompt` asks for them (the repetition
    penalty). Adding a token costs O(1).
    """

    def __init__(
        self, prompt: NDArray[np.int32], generated: Iterable[int], *, with_prompt: bool
    ) -> None:
        seen = np.unique(prompt) if with_prompt else prompt[:0]
        room = len(seen) + 64
        self._ids = np.zeros(room, dtype=np.int64)
        self._counts = np.zeros(room, dtype=np.float32)
        self._ids[: len(seen)] = seen
        self._place = {int(token): place for place, token in enumerate(seen)}
        for token in generated:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place)]

    def after(self, tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`ids` and `counts` as they would be if `tokens` were generated."""
        if not tokens:
            return self.ids, self.counts
        new = list(dict.fromkeys(token for token in tokens if token not in self._place))
        ids = np.concatenate([self.ids, np.array(new, dtype=np.int64)])
        counts = np.concatenate([self.counts, np.zeros(len(new), dtype=np.float32)])
        for token in tokens:
            place = self._place.get(token)
            counts[len(self._place) + new.index(token) if place is None else place] += 1
        return ids, counts

    def add(self, token: int) -> None:
        """`token` was generated."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

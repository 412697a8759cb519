"""A prompt's hidden states as one vector.

Rows come in the order of their positions and once each, in chunks of any size. They are added one after the other, in
float64, so a vector does not depend on the chunks, to the bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import FailureKind, RequestError
from headrace.wire.frames import Pooling, Submit

Floats = NDArray[np.float32]


def check_pooling(submit: Submit, *, pools: bool) -> None:
    """Raises `RequestError` where the vector of a prompt is wanted that is not to be had. `pools`: the model can."""
    if not pools:
        text = "this worker's model gives no hidden states, so it pools no prompts"
        raise RequestError(FailureKind.UNSUPPORTED, text)
    if submit.kv_from is not None or submit.kv_transfer is not None:
        text = "a prompt is pooled where all of it is computed, so not in two legs"
        raise RequestError(FailureKind.UNSUPPORTED, text)
    if submit.max_tokens or submit.sampling.prompt_logprobs is not None:
        text = "a pooled prompt has no answer and no log-probabilities"
        raise RequestError(FailureKind.BAD_SAMPLING, text)


class PooledPrompt:
    """The vector of a prompt of `tokens`, as far as it is computed."""

    def __init__(self, pooling: Pooling, tokens: int) -> None:
        self._pooling = pooling
        self._tokens = tokens
        self._sum: NDArray[np.float64] | None = None
        self._rows = 0

    @property
    def wants_all(self) -> bool:
        """Every row is wanted, so none can come from the prefix cache."""
        return self._pooling is Pooling.MEAN

    def wanted(self, start: int, count: int) -> range:
        """Which of `count` rows from position `start` on it wants."""
        stop = min(start + count, self._tokens)
        if self.wants_all:
            return range(start, stop)
        return range(stop - 1, stop) if stop == self._tokens else range(0)

    def add(self, rows: Floats) -> None:
        """These are the next of the wanted rows, `[n, hidden]`."""
        if self._sum is None:
            self._sum = np.zeros(rows.shape[1], dtype=np.float64)
        for row in rows:
            self._sum += row
        self._rows += len(rows)

    def vector(self) -> bytes:
        """Float32, little-endian, once all rows came."""
        assert self._sum is not None, "no row came"
        assert self._rows == (self._tokens if self.wants_all else 1), "not all rows came"
        return (self._sum / self._rows).astype("<f4").tobytes()

    def reset(self) -> None:
        """The prompt is computed again from its first token on."""
        self._sum, self._rows = None, 0

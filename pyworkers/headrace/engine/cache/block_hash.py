"""Names of block contents: chained hashes, the same that the router computes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace import _core


class BlockHasher(Protocol):
    """Names the full blocks of token sequences. Equal names mean equal tokens up to there, and equal salt."""

    def follow(self, parent: bytes | None, tokens: NDArray[np.int32], salt: bytes) -> list[bytes]:
        """Names of the full blocks of `tokens`; the first of them follows `parent` or is the first of all."""
        ...

    def follow_each(self, parents: list[bytes], tokens: NDArray[np.int32]) -> list[bytes]:
        """The name of one block after each of `parents`; `tokens` are those of the blocks, one after the other."""
        ...


class KeyedBlockHasher:
    """Names by the deployment's hash key."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self._block_tokens = block_tokens

    def follow(self, parent: bytes | None, tokens: NDArray[np.int32], salt: bytes) -> list[bytes]:
        data = tokens.astype("<u4").tobytes()
        root = salt if parent is None else None  # a parent holds it already
        return _core.hash_blocks(data, self._block_tokens, self._key, root, parent)

    def follow_each(self, parents: list[bytes], tokens: NDArray[np.int32]) -> list[bytes]:
        return _core.hash_next_blocks(
            tokens.reshape(len(parents), self._block_tokens), self._key, parents
        )

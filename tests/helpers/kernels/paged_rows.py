"""Batches over paged sequences, for tests of backends: every row has a token of its own.

A test makes a table with one row for each position of each sequence, and so decides what its operations get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.ops import Backend

BLOCK = 16

# Positions start..stop of a sequence.
Part = tuple[int, int, int]


class PagedRows:
    """Sequences of these lengths in shuffled blocks. The row of a position has token `first[seq] + position`."""

    def __init__(self, lengths: Sequence[int], block_tokens: int = BLOCK, seed: int = 3) -> None:
        self.lengths = list(lengths)
        self.block_tokens = block_tokens
        counts = [math.ceil(n / block_tokens) for n in lengths]
        self.num_blocks = sum(counts)
        order = np.random.default_rng(seed).permutation(self.num_blocks)
        self.tables = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
        self.first = [0, *np.cumsum(lengths).tolist()]

    @property
    def rows(self) -> int:
        return self.first[-1]

    def whole(self) -> list[Part]:
        return [(seq, 0, n) for seq, n in enumerate(self.lengths)]

    def batch(self, parts: Sequence[Part]) -> Batch:
        """All rows of these parts, whose logits are all wanted."""
        tables = np.zeros(
            (len(parts), max((len(self.tables[s]) for s, _, _ in parts), default=0)), np.int32
        )
        slots: list[int] = []
        for i, (seq, start, stop) in enumerate(parts):
            table = self.tables[seq]
            tables[i, : len(table)] = table
            slots += [
                table[p // self.block_tokens] * self.block_tokens + p % self.block_tokens
                for p in range(start, stop)
            ]
        positions = [p for _, start, stop in parts for p in range(start, stop)]
        lengths = [stop - start for _, start, stop in parts]
        return Batch(
            tokens=np.array(self.tokens(parts), np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int64),
            seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=np.array([stop for _, _, stop in parts], np.int32),
            block_tables=tables,
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )

    def draft(
        self, parts: Sequence[Part], hidden_from: Sequence[int], first_key: int, *, chained: bool
    ) -> DraftBatch:
        batch = self.batch(parts)
        return DraftBatch(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots,
            seq_starts=batch.seq_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_rows=batch.logit_rows,
            hidden_from=np.array(hidden_from, np.int32),
            first_keys=np.full(len(parts), first_key, np.int32),
            chained=chained,
        )

    def tokens(self, parts: Sequence[Part]) -> list[int]:
        return [self.first[s] + p for s, start, stop in parts for p in range(start, stop)]


def cache_floats(backend: Backend) -> NDArray[np.float32]:
    """All of a native backend's cache, `[blocks, floats of a block]`, writable."""
    pool = backend.kv_pool()
    memory = pool.groups[0][0].memory
    assert isinstance(memory, memoryview), "a pool on the CPU"
    return np.frombuffer(memory, np.float32).reshape(pool.num_blocks, -1)

"""Steps of sequences through a model, as an engine would build them: any cut, any company, any blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.models import Batch, Model
from helpers.kernels.tensor_backend import floats_of


@dataclass(slots=True)
class Stream:
    """One sequence: its tokens, how many are computed, and its blocks."""

    tokens: Sequence[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafted: int = 1  # positions below it have their row in the drafting layer; position 0 has none


class Stepper:
    """Feeds streams to a model; blocks are handed out in a scrambled order, so that tables matter."""

    def __init__(self, model: Model, block_tokens: int, blocks: int = 256) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.pools = False  # `hidden` has the rows of the last step
        self.hidden: list[torch.Tensor] = []
        model.allocate_kv(blocks)
        self._free = np.random.default_rng(5).permutation(blocks).tolist()

    def stream(
        self, tokens: Sequence[int], shared: Stream | None = None, cached: int = 0
    ) -> Stream:
        """A new sequence, which may begin with `cached` tokens computed by another (whole blocks)."""
        assert cached % self.block_tokens == 0
        stream = Stream(tokens, computed=cached)
        if shared is not None:
            stream.blocks = shared.blocks[: cached // self.block_tokens]
        return stream

    def reserve(self, stream: Stream, tokens: int) -> None:
        """Give the stream blocks for so many tokens."""
        while len(stream.blocks) * self.block_tokens < tokens:
            stream.blocks.append(self._free.pop())

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[torch.Tensor]:
        """Compute the next `n` tokens of each stream; the logits of those rows, one tensor a stream.

        Without work it is a step without rows.
        """
        size = self.block_tokens
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for stream, n in work:
            end = stream.computed + n
            self.reserve(stream, end)
            tokens += stream.tokens[stream.computed : end]
            positions += range(stream.computed, end)
            slots += [
                stream.blocks[p // size] * size + p % size for p in range(stream.computed, end)
            ]
            stream.computed = end
        width = max((len(stream.blocks) for stream, _ in work), default=0)
        starts = [0, *itertools.accumulate(n for _, n in work)]
        logits = floats_of(
            self.model.forward(
                Batch(
                    tokens=np.array(tokens, np.int32),
                    positions=np.array(positions, np.int32),
                    slots=np.array(slots, np.int64),
                    seq_starts=np.array(starts, np.int32),
                    context_lens=np.array([stream.computed for stream, _ in work], np.int32),
                    block_tables=np.array(
                        [stream.blocks + [0] * (width - len(stream.blocks)) for stream, _ in work],
                        np.int32,
                    ).reshape(len(work), width),
                    logit_rows=np.arange(len(tokens), dtype=np.int32),
                    pool_rows=np.arange(len(tokens), dtype=np.int32) if self.pools else None,
                )
            )
        )
        if self.pools:
            rows = floats_of(self.model.pooled())
            self.hidden = [rows[a:b] for a, b in itertools.pairwise(starts)]
        return [logits[a:b] for a, b in itertools.pairwise(starts)]

    def whole(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of a sequence computed alone, in one step."""
        return self.step([(self.stream(tokens), len(tokens))])[0]

"""Main steps with the draft pass after each, as an engine would build it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from headrace.models import DraftBatch
from helpers.kernels.tensor_backend import floats_of
from helpers.models.stepping import Stepper, Stream


class Drafter:
    """Feeds streams to a model that drafts. The draft rows of a stream follow its main rows by one position."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.last_rows: dict[int, int] = {}  # of each stream (by id), in the last draft pass

    def step(
        self, work: Sequence[tuple[Stream, int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Main logits of the next `n` tokens of each stream, and the draft logits of all rows that follow.

        A stream that begins with cached blocks gets the row at their end from the hidden tail of the last of them.
        """
        before = [stream.computed for stream, _ in work]
        main = self.stepper.step(work)
        starts = [0, *itertools.accumulate(n for _, n in work)]
        rows: list[tuple[Stream, range, list[int]]] = []
        for (stream, _), s, first_row in zip(work, before, starts, strict=False):
            end = min(stream.computed, len(stream.tokens) - 1)
            source = [first_row + j - 1 - s for j in range(s + 1, end + 1)]
            begin = s + 1
            if s > 0 and stream.drafted < s + 1:  # cached: its row is not made yet
                begin, source = s, [-(stream.blocks[(s - 1) // self.size] + 1), *source]
            rows.append((stream, range(begin, end + 1), source))
            stream.drafted = max(stream.drafted, end + 1)
        return main, self.draft(rows)

    @property
    def size(self) -> int:
        return self.stepper.block_tokens

    def draft(
        self, rows: Sequence[tuple[Stream, range, list[int]]], *, chained: bool = False
    ) -> list[torch.Tensor]:
        """Draft logits of positions of each stream; beside each position, where its hidden state comes from."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for stream, span, _ in rows:
            self.stepper.reserve(stream, span.stop)
            tokens += [stream.tokens[j] for j in span]
            positions += span
            slots += [stream.blocks[j // self.size] * self.size + j % self.size for j in span]
        width = max(len(stream.blocks) for stream, _, _ in rows)
        starts = [0, *itertools.accumulate(len(span) for _, span, _ in rows)]
        self.last_rows = {id(row[0]): end - 1 for row, end in zip(rows, starts[1:], strict=True)}
        tables = [stream.blocks + [0] * (width - len(stream.blocks)) for stream, _, _ in rows]
        logits = floats_of(
            self.stepper.model.draft(
                DraftBatch(
                    tokens=np.array(tokens, np.int32),
                    positions=np.array(positions, np.int32),
                    slots=np.array(slots, np.int64),
                    seq_starts=np.array(starts, np.int32),
                    context_lens=np.array([span.stop for _, span, _ in rows], np.int32),
                    block_tables=np.array(tables, np.int32),
                    logit_rows=np.arange(len(tokens), dtype=np.int32),
                    hidden_from=np.array([r for row in rows for r in row[2]], np.int32),
                    first_keys=np.ones(len(rows), np.int32),
                    chained=chained,
                )
            )
        )
        return [logits[a:b] for a, b in itertools.pairwise(starts)]

    def chain(self, streams: Sequence[Stream]) -> list[torch.Tensor]:
        """One more row of each stream, for the token after its last drafted row, which it must have by now."""
        rows = [(s, range(s.drafted, s.drafted + 1), [self.last_rows[id(s)]]) for s in streams]
        for stream in streams:
            stream.drafted += 1
        return self.draft(rows, chained=True)

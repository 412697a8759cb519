"""Turns a plan into the arrays that a model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.schedule import Work
from headrace.engine.sequence import Sequence
from headrace.models.batch import Batch


@dataclass(slots=True)
class Prepared:
    """A batch, and whose logits come back: `sampled` first, one row each, then the rows of `prompt_rows`."""

    batch: Batch
    sampled: list[Sequence]
    prompt_rows: list[tuple[Sequence, NDArray[np.int32]]]  # with the token that each row predicts


class BatchBuilder:
    """Keeps the block tables of the running sequences by seat, so that a step copies rows and walks no lists."""

    def __init__(self, *, block_tokens: int, max_sequences: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._table = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self._filled = [0] * max_sequences

    def seat(self, sequence: Sequence) -> None:
        """The sequence took its seat, or its blocks were exchanged."""
        assert sequence.seat is not None
        self._table[sequence.seat] = 0
        self._filled[sequence.seat] = 0
        self._append(sequence)

    def _append(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        filled, count = self._filled[sequence.seat], len(sequence.blocks)
        self._table[sequence.seat, filled:count] = sequence.blocks[filled:]
        self._filled[sequence.seat] = count

    def build(self, work: list[Work]) -> Prepared:
        count = len(work)
        sampled: list[Sequence] = []
        sampled_rows: list[int] = []
        prompt_rows: list[tuple[Sequence, NDArray[np.int32]]] = []
        other_rows: list[NDArray[np.int32]] = []
        seats, computed, counts, tokens = [0] * count, [0] * count, [0] * count, [0] * count
        chunks: list[tuple[int, NDArray[np.int32]]] = []
        row = 0
        for place, item in enumerate(work):
            sequence = item.sequence
            seat, start = sequence.seat, sequence.computed
            assert seat is not None
            if self._filled[seat] != len(sequence.blocks):
                self._append(sequence)
            seats[place], computed[place], counts[place] = seat, start, item.count
            stop = start + item.count
            total = sequence.total
            if item.count == 1 and stop == total and sequence.generated:
                tokens[place] = sequence.generated[-1]
            else:
                chunks.append((row, sequence.tokens(start, stop)))
            if stop == total and total < sequence.limit:
                sampled.append(sequence)
                sampled_rows.append(row + item.count - 1)
            if sequence.prompt_logprobs is not None:
                targets = sequence.prompt[start + 1 : stop + 1]
                prompt_rows.append((sequence, targets))
                other_rows.append(np.arange(row, row + len(targets), dtype=np.int32))
            row += item.count

        seat_of = np.array(seats)
        counts_of = np.array(counts, dtype=np.int32)
        starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(counts_of, out=starts[1:])
        first = np.array(computed, dtype=np.int32)
        positions = np.repeat(first - starts[:-1], counts_of) + np.arange(row, dtype=np.int32)
        token_rows = np.repeat(np.array(tokens, dtype=np.int32), counts_of)
        for begin, chunk in chunks:
            token_rows[begin : begin + len(chunk)] = chunk
        in_block = positions // self.block_tokens
        blocks = self._table[np.repeat(seat_of, counts_of), in_block].astype(np.int64)
        context_lens = first + counts_of
        width = -(-int(context_lens.max()) // self.block_tokens)
        batch = Batch(
            tokens=token_rows,
            positions=positions,
            slots=blocks * self.block_tokens + (positions - in_block * self.block_tokens),
            seq_starts=starts,
            context_lens=context_lens,
            block_tables=np.take(self._table[:, :width], seat_of, axis=0),
            logit_rows=np.concatenate([np.array(sampled_rows, dtype=np.int32), *other_rows]),
        )
        return Prepared(batch, sampled, prompt_rows)

"""Turns a plan into the arrays that a model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.rows import spread
from headrace.engine.sequence import Sequence
from headrace.engine.work import Work
from headrace.models.batch import Batch


@dataclass(slots=True)
class Prepared:
    """A batch, and whose logits come back: those of `sampled` first, then the rows of `prompt_rows`.

    Of a sampled sequence come the row of its newest token and those of its drafts, `sampled_rows[i]` in all.
    """

    batch: Batch
    seats: NDArray[np.int64]  # [seqs], whose rows these are
    sampled: list[Sequence]
    sampled_rows: NDArray[np.int64]  # [sampled]
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

    def room(self, seats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that the blocks of these seats hold."""
        return np.array(self._filled)[seats] * self.block_tokens

    def blocks(self, seats: NDArray[np.int64], positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The block of each position of its seat."""
        return self._table[seats, positions // self.block_tokens].astype(np.int64)

    def slots(self, seats: NDArray[np.int64], positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The slot of each position of its seat."""
        return (
            self.blocks(seats, positions) * self.block_tokens + positions % self.block_tokens
        ).astype(np.int64)

    def tables(self, seats: NDArray[np.int64], tokens: int) -> NDArray[np.int32]:
        """The block tables of these seats, for at most so many tokens each."""
        width = -(-tokens // self.block_tokens)
        return np.take(self._table[:, :width], seats, axis=0)

    def build(self, work: list[Work]) -> Prepared:
        count = len(work)
        sampled: list[Sequence] = []
        sampled_first: list[int] = []
        sampled_rows: list[int] = []
        prompt_rows: list[tuple[Sequence, NDArray[np.int32]]] = []
        other_rows: list[NDArray[np.int32]] = []
        seats, computed, counts, tokens = [0] * count, [0] * count, [0] * count, [0] * count
        prompt_lens = np.fromiter((item.sequence.prompt_len for item in work), np.int32, count)
        chunks: list[tuple[int, NDArray[np.int32]]] = []
        draft_rows: list[int] = []
        drafts: list[int] = []
        row = 0
        for place, item in enumerate(work):
            sequence = item.sequence
            seat, start = sequence.seat, sequence.computed
            assert seat is not None
            if self._filled[seat] != len(sequence.blocks):
                self._append(sequence)
            rows = item.count + item.drafts
            seats[place], computed[place], counts[place] = seat, start, rows
            stop = start + item.count
            total = sequence.total
            if item.count == 1 and stop == total and sequence.generated:
                tokens[place] = sequence.generated[-1]
                if item.drafts:
                    draft_rows += range(row + 1, row + rows)
                    drafts += sequence.drafts[: item.drafts]
            else:
                chunks.append((row, sequence.tokens(start, stop)))
            if stop == total and total < sequence.limit:
                sampled.append(sequence)
                sampled_first.append(row + item.count - 1)
                sampled_rows.append(1 + item.drafts)
            if sequence.prompt_logprobs is not None:
                targets = sequence.prompt[start + 1 : stop + 1]
                prompt_rows.append((sequence, targets))
                other_rows.append(np.arange(row, row + len(targets), dtype=np.int32))
            row += rows

        seat_of = np.array(seats)
        counts_of = np.array(counts, dtype=np.int32)
        starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(counts_of, out=starts[1:])
        first = np.array(computed, dtype=np.int32)
        positions = np.repeat(first - starts[:-1], counts_of) + np.arange(row, dtype=np.int32)
        token_rows = np.repeat(np.array(tokens, dtype=np.int32), counts_of)
        for begin, chunk in chunks:
            token_rows[begin : begin + len(chunk)] = chunk
        if drafts:
            token_rows[draft_rows] = drafts
        context_lens = first + counts_of
        rows_of = np.array(sampled_rows, dtype=np.int64)
        logit_rows = spread(np.array(sampled_first, dtype=np.int64), rows_of).astype(np.int32)
        batch = Batch(
            tokens=token_rows,
            positions=positions,
            slots=self.slots(np.repeat(seat_of, counts_of), positions),
            seq_starts=starts,
            context_lens=context_lens,
            block_tables=self.tables(seat_of, int(context_lens.max())),
            logit_rows=np.concatenate([logit_rows, *other_rows]),
            prompt_lens=prompt_lens,
        )
        return Prepared(batch, seat_of, sampled, rows_of, prompt_rows)

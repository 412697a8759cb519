"""The toy model with a module that drafts, which knows what every row of it must be and sees every mistake.

A hidden state is the digest of all tokens up to its position. The drafting layer keeps for each position its token and
the hidden state before it; a drafting pass checks that each of these in its window is what it must be, and guesses with
the logits that the model itself will give, or, for a share of the places, with others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_kernels.ops import KvPool, KvRegion
from headrace_kernels.pool_memory import PoolMemory
from helpers.engine.toy import GARBAGE, GROUPS, ToyModel, check_batch, digest, toy_logits

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.ops import Progress

KNOWN: dict[int, NDArray[np.int64]] = {}  # hidden state -> the KV that it is of, of all models
MASK = 2**62 - 1


def hidden_of(kv: NDArray[np.int64]) -> int:
    state = digest(kv) & MASK
    KNOWN[state] = kv.copy()
    return state


class FakeClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class DraftingToy(ToyModel):
    """`agreement` is the share of guesses that are those of the model itself."""

    kv_layout = "toy mtp"

    def __init__(
        self,
        *,
        agreement: float = 1.0,
        draft_token_ids: NDArray[np.int32] | None = None,
        vocab_size: int = 50,
        block_tokens: int = 4,
        context_tokens: int = 256,
    ) -> None:
        self.agreement = agreement
        self.draft_passes = 0
        self.clock = FakeClock()
        self.fixed_ms = self.row_ms = self.draft_ms = 0.0  # what a pass and its rows take
        self.kept: list[int] = []  # hidden states of the last main pass
        self.chain: list[int] = []  # of the last drafting pass
        self.fail_next_draft: Exception | None = None
        super().__init__(
            vocab_size=vocab_size, block_tokens=block_tokens, context_tokens=context_tokens
        )
        self.drafts = True
        self.draft_token_ids = draft_token_ids
        self.kv_block_bytes = (GROUPS * block_tokens + block_tokens + 1) * 8

    def allocate_kv(self, num_blocks: int) -> None:
        size = self.block_tokens
        self.kv_block_bytes = (GROUPS * size + size + 1) * 8
        self.memory = PoolMemory(num_blocks * self.kv_block_bytes)
        words = np.frombuffer(self.memory.view, np.int64).reshape(num_blocks, -1)
        words[:] = GARBAGE
        self.cells = words[:, : GROUPS * size].reshape(num_blocks, GROUPS, size)
        self.draft_cells = words[:, GROUPS * size : -1]
        self.tails = words[:, -1]

    def kv_pool(self) -> KvPool:
        nbytes = self.block_tokens * 8

        def region(offset: int, length: int) -> KvRegion:
            return KvRegion(
                memory=self.memory.view, stride=self.kv_block_bytes, offset=offset, nbytes=length
            )

        return KvPool(
            num_blocks=len(self.cells),
            block_bytes=self.kv_block_bytes,
            groups=[[region(0, nbytes)], [region(nbytes, self.kv_block_bytes - nbytes)]],
            device="cpu",
            memfd=self.memory.memfd,
        )

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        def all_but_the_last(groups: int, fence: object = None) -> None:
            if progress is not None and groups < GROUPS:
                progress(groups)

        logits = super().forward(batch, all_but_the_last)
        self.clock.now_s += (self.fixed_ms + self.row_ms * batch.rows) / 1e3
        self.kept = []
        for seq in range(batch.seqs):
            kv = self._main_kv(batch, seq, int(batch.context_lens[seq]))
            end = int(batch.seq_starts[seq + 1])
            for row in range(int(batch.seq_starts[seq]), end):
                position = int(batch.positions[row])
                state = hidden_of(kv[: position + 1])
                self.kept.append(state)
                block, offset = divmod(int(batch.slots[row]), self.block_tokens)
                if row == end - 1 or offset == self.block_tokens - 1:
                    self.tails[block] = state
        self.chain = []
        return logits

    def _main_kv(self, batch: Batch, seq: int, tokens: int) -> NDArray[np.int64]:
        table = batch.block_tables[seq].astype(np.int64)
        places = np.arange(tokens)
        return self.cells[table[places // self.block_tokens], 0, places % self.block_tokens]

    def draft(self, batch: DraftBatch) -> torch.Tensor:
        self.draft_passes += 1
        check_batch(batch, self.block_tokens)
        if self.fail_next_draft is not None:
            error, self.fail_next_draft = self.fail_next_draft, None
            raise error
        assert batch.hidden_from.dtype == batch.first_keys.dtype == np.int32
        assert (batch.first_keys >= 1).all()
        self.clock.now_s += (self.draft_ms * max(len(batch.logit_rows), 1)) / 1e3
        source = self.chain if batch.chained else self.kept
        states: list[int] = []
        for seq in range(batch.seqs):
            table = batch.block_tables[seq].astype(np.int64)
            start, end = int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1])
            for row in range(start, end):
                position, token = int(batch.positions[row]), int(batch.tokens[row])
                origin = int(batch.hidden_from[row])
                state = source[origin] if origin >= 0 else int(self.tails[-origin - 1])
                before = KNOWN[state]
                assert len(before) == position, "the hidden state is of another position"
                if not batch.chained:
                    true = self._main_kv(batch, seq, position)
                    assert (true == before).all(), "the hidden state is of another text"
                kv = np.append(before, token * 4096 + position)
                block, offset = divmod(int(batch.slots[row]), self.block_tokens)
                self.draft_cells[block, offset] = self._cell(kv)
                places = np.arange(int(batch.first_keys[seq]), position + 1)
                keys = self.draft_cells[
                    table[places // self.block_tokens], places % self.block_tokens
                ]
                want = [self._cell(kv[: place + 1]) for place in places.tolist()]
                assert keys.tolist() == want, "a key in the window is not true"
                states.append(hidden_of(kv))
        self.chain = states
        rows = [self._guess(states[row]) for row in batch.logit_rows.tolist()]
        width = self.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, width), np.float32))

    def _cell(self, kv: NDArray[np.int64]) -> int:
        """Of the last position of `kv`: its token and the hidden state before it."""
        return (int(kv[-1]) ^ (digest(kv[:-1]) & MASK)) & MASK

    def _guess(self, state: int) -> NDArray[np.float32]:
        kv = KNOWN[state]
        whole = digest(kv)
        right = (whole >> 40) % 1000 < self.agreement * 1000
        logits = toy_logits(whole if right else whole ^ 0x5555_5555, self.vocab_size)
        return logits if self.draft_token_ids is None else logits[self.draft_token_ids]

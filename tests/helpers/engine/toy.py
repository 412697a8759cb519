"""A model without weights whose logits depend on every token before, read back through the block table.

Its "KV" is the token and its position in each slot, once in each of two layer groups. A wrong slot, a block handed out
twice, a row computed twice, a stale block or one that was moved only in part changes the logits, so engine mistakes
become wrong tokens.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.models.step_memory import StepMemory
from headrace.wire.frames import KvFrom, KvTransfer, Resume, Sampling, Submit
from headrace_kernels.ops import KvPool, KvRegion
from headrace_kernels.pool_memory import PoolMemory
from helpers.kv.pull_keys import PULL_KEY

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.ops import Fence, Progress

GARBAGE = 0xDEAD
GROUPS = 2
POOLED_WIDTH = 4  # of a row that stands for a hidden state
LOGITS = np.random.default_rng(7).normal(size=(1024, 8192)).astype(np.float32) * 2


class ToyModel:
    kv_layout = "toy"
    dtype_name = "int"

    def __init__(
        self, *, vocab_size: int = 50, block_tokens: int = 4, context_tokens: int = 256
    ) -> None:
        self.config: Any = SimpleNamespace()
        self.vocab_size = vocab_size
        self.block_tokens = block_tokens
        self.kv_block_bytes = GROUPS * block_tokens * 8
        self.context_tokens = context_tokens
        self.answers_apart = False
        self.ahead_on: torch.device | None = None
        self.drafts = False
        self.draft_token_ids: NDArray[np.int32] | None = None
        self.pooled_width = POOLED_WIDTH
        self._pooled = torch.empty(0, POOLED_WIDTH)
        self.forwards = 0
        self.rows = 0
        self.fail_next: BaseException | None = None
        self.allocate_kv(1)

    def step_memory(self, *, rows: int, answers: int, context_tokens: int, mtp: bool) -> StepMemory:
        del answers, context_tokens, mtp
        return StepMemory(lasting=0, attention=0, mlp=0, logits=4 * rows * self.vocab_size)

    def record_steps(self) -> None:
        """It has no kernels."""

    def allocate_kv(self, num_blocks: int) -> None:
        self.memory = PoolMemory(num_blocks * self.kv_block_bytes)
        cells = np.frombuffer(self.memory.view, np.int64)
        self.cells = cells.reshape(num_blocks, GROUPS, self.block_tokens)
        self.cells[:] = GARBAGE

    def kv_pool(self) -> KvPool:
        nbytes = self.kv_block_bytes // GROUPS
        return KvPool(
            num_blocks=len(self.cells),
            block_bytes=self.kv_block_bytes,
            groups=[
                [
                    KvRegion(
                        memory=self.memory.view,
                        stride=self.kv_block_bytes,
                        offset=group * nbytes,
                        nbytes=nbytes,
                    )
                ]
                for group in range(GROUPS)
            ],
            device="cpu",
            memfd=self.memory.memfd,
        )

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        self.forwards += 1
        self.rows += batch.rows
        check_batch(batch, self.block_tokens)
        blocks, offsets = np.divmod(batch.slots, self.block_tokens)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            self.cells[blocks, :, offsets] = GARBAGE
            raise error
        tokens = batch.tokens
        if batch.newest is not None:
            tokens = np.where(tokens < 0, batch.newest.numpy()[-1 - np.minimum(tokens, -1)], tokens)
        kv = tokens.astype(np.int64) * 4096 + batch.positions
        for group in range(GROUPS):
            self.cells[blocks, group, offsets] = kv ^ group
            if progress is not None:
                progress(group + 1)
        pooled = [] if batch.pool_rows is None else batch.pool_rows.tolist()
        wanted = {*batch.logit_rows.tolist(), *pooled}
        states: dict[int, int] = {}
        for seq in range(batch.seqs):
            context = int(batch.context_lens[seq])
            table = batch.block_tables[seq].astype(np.int64)
            places = np.arange(context)
            kv, other = self.cells[
                table[places // self.block_tokens], :, places % self.block_tokens
            ].T
            kv = np.where(kv ^ 1 == other, kv, GARBAGE)
            end = int(batch.seq_starts[seq + 1])
            for row in range(int(batch.seq_starts[seq]), end):
                if row in wanted:
                    states[row] = digest(kv[: context - (end - 1 - row)])
        if pooled:
            self._pooled = torch.from_numpy(np.stack([toy_row(states[row]) for row in pooled]))
        rows = [toy_logits(states[row], self.vocab_size) for row in batch.logit_rows.tolist()]
        return torch.from_numpy(
            np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)
        )

    def draft(self, batch: DraftBatch) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("a toy does not draft")

    def pooled(self) -> torch.Tensor:
        return self._pooled

    def fence(self) -> Fence | None:
        return None


def digest(kv: NDArray[np.int64]) -> int:
    return int.from_bytes(hashlib.blake2b(kv.tobytes(), digest_size=8).digest(), "little")


def toy_logits(state: int, vocab_size: int) -> NDArray[np.float32]:
    start = (state >> 10) % (LOGITS.shape[1] - vocab_size)
    return LOGITS[state % len(LOGITS), start : start + vocab_size].copy()


def toy_row(state: int) -> NDArray[np.float32]:
    return toy_logits(state, POOLED_WIDTH)


def check_batch(batch: Batch, block_tokens: int) -> None:
    """What every model may rely on."""
    for name, dtype in [
        ("tokens", np.int32),
        ("positions", np.int32),
        ("slots", np.int64),
        ("seq_starts", np.int32),
        ("context_lens", np.int32),
        ("block_tables", np.int32),
        ("logit_rows", np.int32),
    ]:
        array = getattr(batch, name)
        assert array.dtype == dtype, name
        assert array.flags.c_contiguous, name
    assert len(set(batch.slots.tolist())) == batch.rows, "two rows share a slot"
    for seq in range(batch.seqs):
        rows = slice(int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1]))
        positions = batch.positions[rows]
        last = int(batch.context_lens[seq])
        assert positions.tolist() == list(range(last - len(positions), last))
        blocks = batch.block_tables[seq][positions // block_tokens].astype(np.int64)
        assert (batch.slots[rows] == blocks * block_tokens + positions % block_tokens).all()


class ToyHasher:
    """Block names without the Rust extension."""

    def __init__(self, block_tokens: int = 4, key: bytes = b"key") -> None:
        self.block_tokens = block_tokens
        self.key = key

    def follow(self, parent: bytes | None, tokens: NDArray[np.int32], salt: bytes) -> list[bytes]:
        names: list[bytes] = []
        before = salt if parent is None else parent
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            data = before + tokens[start : start + self.block_tokens].tobytes()
            before = hashlib.blake2b(data, key=self.key, digest_size=16).digest()
            names.append(before)
        return names

    def follow_each(self, parents: list[bytes], tokens: NDArray[np.int32]) -> list[bytes]:
        blocks = tokens.reshape(len(parents), self.block_tokens)
        return [self.follow(p, block, b"")[0] for p, block in zip(parents, blocks, strict=True)]


def pack(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def make_submit(
    request: int,
    tokens: list[int],
    *,
    max_tokens: int = 8,
    sampling: Sampling | None = None,
    stop_ids: list[int] | None = None,
    deadline_ms: int | None = None,
    priority: int = 0,
    salt: bytes = b"",
    resumed: list[int] | None = None,
    lease_ms: int | None = None,
    kv_from: KvFrom | None = None,
) -> Submit:
    return Submit(
        request=request,
        tokens=pack(tokens),
        sampling=sampling or Sampling(),
        stop_ids=stop_ids or [],
        max_tokens=max_tokens,
        deadline_ms=deadline_ms,
        priority=priority,
        salt=salt,
        kv_from=kv_from,
        resume=None if resumed is None else Resume(pack(resumed), len(resumed)),
        kv_transfer=None if lease_ms is None else KvTransfer(lease_ms, PULL_KEY),
    )

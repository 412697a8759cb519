"""The rows of one engine step: what the engine builds and a model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows of all sequences, one sequence after the other, prefill and decode mixed freely.

    A row is one token to compute. Every array is C-contiguous and the caller's: a model only reads it,
    and only during `forward`.
    """

    tokens: NDArray[np.int32]  # [rows]
    positions: NDArray[np.int32]  # [rows], consecutive within a sequence
    slots: NDArray[np.int64]  # [rows], block * block_tokens + offset: where this row's KV goes
    seq_starts: NDArray[
        np.int32
    ]  # [seqs + 1], rows of sequence s are seq_starts[s]:seq_starts[s + 1]
    context_lens: NDArray[
        np.int32
    ]  # [seqs], KV tokens after this step, the step's own rows included
    block_tables: NDArray[np.int32]  # [seqs, max_blocks], unused entries 0
    logit_rows: NDArray[np.int32]  # [n], rows whose logits are wanted
    # [seqs], tokens of a sequence that are its prompt, which a GPU computes in another way than the answer; None: all
    # rows in the way of the answer
    prompt_lens: NDArray[np.int32] | None = None
    # [batch rows], on the model's device, int32: a token below 0 is that of batch row -1 - token, which the host does
    # not know
    # yet. Only for models that run ahead of the host
    newest: torch.Tensor | None = None
    # [m], rows whose hidden states are wanted as the head reads them; None: of no row
    pool_rows: NDArray[np.int32] | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def seqs(self) -> int:
        return len(self.context_lens)


@dataclass(slots=True, kw_only=True)
class DraftBatch(Batch):
    """Rows of the module that drafts. The row of position j takes token j and the main hidden of position j - 1.

    Its KV goes into slot j of the drafting layer. Position 0 has no such row.
    """

    # [rows]; r >= 0: row r of the last main forward, or, `chained`, of the last draft pass;
    # -(b + 1): the hidden tail of block b
    hidden_from: NDArray[np.int32]
    first_keys: NDArray[np.int32]  # [seqs], the first position whose key there is, at least 1
    chained: bool

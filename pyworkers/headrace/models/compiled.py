"""A model whose forward pass is compiled: what all families share once their weights are on a backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.models import UnsupportedModelError
from headrace.models.config import ModelConfig
from headrace.models.step_memory import ExpertSpread, StepMemory, StepShape, step_memory
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.ops import (
    Compiled,
    CompiledDraft,
    Fence,
    KvPool,
    Progress,
    Results,
    Store,
)


class CompiledModel:
    """A `Model`: compiled passes over weights and a cache that `store` holds. Without `draft` it drafts nothing."""

    answers_apart = False
    draft_token_ids: NDArray[np.int32] | None = None
    experts: ExpertSpread | None = None  # where they lie on several ranks

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        run: Compiled,
        block_tokens: int,
        draft: CompiledDraft | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.block_tokens = block_tokens
        self.kv_block_bytes = store.kv_block_bytes
        self.kv_layout = store.kv_layout
        self.dtype_name = store.dtype_name
        self.ahead_on = store.ahead_on
        self.drafts = draft is not None
        self.pooled_width = config.hidden_size
        self._store = store
        self._run = run
        self._draft = draft

    def step_memory(self, *, rows: int, answers: int, context_tokens: int, mtp: bool) -> StepMemory:
        step = self._store.step
        shape = StepShape(
            rows=rows,
            answers=answers,
            context_tokens=context_tokens,
            mtp=mtp,
            element_bytes=step.element_bytes,
            torch=step.torch,
            fp8=step.fp8,
            experts=self.experts,
            mapped_bytes=step.mapped_bytes,
        )
        return step_memory(self.config, shape)

    def record_steps(self) -> None:
        self._store.record_steps()

    def allocate_kv(self, num_blocks: int) -> None:
        self._store.allocate_kv(num_blocks)

    def kv_pool(self) -> KvPool:
        return self._store.kv_pool()

    def forward(self, batch: Batch, progress: Progress | None = None) -> Results:
        return self._run(batch, progress)

    def draft(self, batch: DraftBatch) -> Results:
        if self._draft is None:
            raise UnsupportedModelError("no layer for multi-token prediction is loaded")
        return self._draft(batch)

    def pooled(self) -> Results:
        return self._store.pooled

    def fence(self) -> Fence | None:
        return self._store.fence()

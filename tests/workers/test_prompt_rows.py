"""A model is told which tokens are prompt, the same after a resume, as a GPU computes them in another way."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.frames import Resume
from headrace.models import Batch
from headrace_kernels.ops import Progress
from helpers.toy import ToyModel, ToyNamer, make_submit, pack


class Watched(ToyModel):
    """Notes how many of its rows were prompt, and how many not."""

    prompt, answer = 0, 0

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        assert batch.prompt_lens is not None
        for seq, prompt_len in enumerate(batch.prompt_lens.tolist()):
            rows = slice(int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1]))
            inside = int((batch.positions[rows] < prompt_len).sum())
            self.prompt += inside
            self.answer += rows.stop - rows.start - inside
        return super().forward(batch, progress)


def test_prompt_rows_are_told_of() -> None:
    for generated in (0, 3):
        model = Watched(block_tokens=4)
        model.allocate_kv(64)
        config = EngineConfig(num_blocks=64, block_tokens=4, max_sequences=4, max_batched_tokens=5)
        engine = Engine(model, config, ToyNamer(4))
        submit = make_submit(1, [5, 6, 7] * 4, max_tokens=6)
        if generated:
            submit = replace(submit, resume=Resume(pack([1, 2, 3]), 3))
        engine.submit(submit)
        for _ in range(20):
            engine.step()
        assert model.prompt == 12
        assert model.answer == 5  # of six tokens the last one is never computed

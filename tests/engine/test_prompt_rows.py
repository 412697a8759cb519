"""A model is told which tokens are prompt, the same after a resume, as a GPU computes them in another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.models import Batch
from headrace.wire.frames import Resume
from headrace_kernels.ops import Progress
from helpers.engine.toy import ToyModel, make_submit, pack
from helpers.engine.toy_engine import engine_on


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
        model = Watched()
        engine = engine_on(model, sequences=4, batched=5)
        submit = make_submit(1, [5, 6, 7] * 4, max_tokens=6)
        if generated:
            submit = replace(submit, resume=Resume(pack([1, 2, 3]), 3))
        engine.submit(submit)
        for _ in range(20):
            engine.step()
        assert model.prompt == 12
        assert model.answer == 5  # of six tokens the last one is never computed


class Apart(ToyModel):
    """Computes answers otherwise than prompts, and so never wants one where it looks for the other."""

    mixed = False

    def __init__(self) -> None:
        super().__init__(block_tokens=4)
        self.answers_apart = True
        self.allocate_kv(64)
        self.is_answer = np.zeros(64 * 4, np.bool_)  # of each slot

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        assert batch.prompt_lens is not None
        starts = np.repeat(batch.prompt_lens, np.diff(batch.seq_starts))
        self.is_answer[batch.slots] = batch.positions >= starts
        for blocks, context, prompt_len in zip(
            batch.block_tables, batch.context_lens, batch.prompt_lens, strict=True
        ):
            slots = (blocks[:, None] * 4 + np.arange(4)).ravel()[:context]
            self.mixed |= bool((self.is_answer[slots] != (np.arange(context) >= prompt_len)).any())
        return super().forward(batch, progress)


@pytest.mark.parametrize("apart", [True, False])
def test_what_was_computed_as_an_answer_is_no_prompt_later(apart: bool) -> None:
    """Neither is it the other way round, after a resume. Where the arithmetic is one, all of it is shared."""
    model = Apart()
    model.answers_apart = apart
    engine = engine_on(model, sequences=4, batched=8)

    def run(number: int, tokens: list[int], resume: list[int]) -> tuple[list[int], int]:
        submit = make_submit(number, tokens, max_tokens=12)
        if resume:
            submit = replace(submit, resume=Resume(pack(resume), len(resume)))
        engine.submit(submit)
        ids: list[int] = []
        cached = -1
        while not engine.empty:
            for output in engine.step().of(0).outputs:
                ids += output.ids
                cached = cached if output.cached_tokens is None else output.cached_tokens
        engine.check()
        return ids, cached

    prompt = [5, 6, 7] * 4
    answer, _ = run(1, prompt, [])
    second, cached = run(2, prompt + answer + [9, 9], [])  # the next turn of the conversation
    assert cached == (12 if apart else 20)  # of 12 tokens of prompt, and 11 computed after it
    resumed, _ = run(3, prompt, answer[:9])  # those tokens are in the cache now, as prompt
    assert answer[9:] == resumed
    assert len(second) == 12
    assert model.mixed is not apart

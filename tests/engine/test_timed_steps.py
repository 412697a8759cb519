"""Two kinds of step are timed before anybody is served: an answer's, and the longest prompt there is time for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.engine.timed_steps import FIRST_TOKENS, LIMIT_S, time_steps
from headrace.wire.frames import StepCost
from headrace_kernels.batch import Batch
from helpers.engine.toy import ToyModel

COLD_S = 0.7  # that the first forward takes longer than others


class TimedModel(ToyModel):
    """A toy whose forwards take as long as they are said to, on a clock of its own."""

    def __init__(self, step_s: float, token_s: float, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.now_s = 0.0
        self.steps: list[tuple[int, int]] = []  # tokens, and the length of the context
        self._step_s, self._token_s = step_s, token_s
        self.graded: list[bool] = []

    def forward(self, batch: Batch, progress: Any = None) -> torch.Tensor:
        self.graded.append(torch.is_inference_mode_enabled())
        self.steps.append((batch.rows, int(batch.context_lens.max())))
        cold_s = COLD_S if len(self.steps) == 1 else 0.0
        self.now_s += cold_s + self._step_s + self._token_s * batch.rows
        return super().forward(batch, progress)

    def clock(self) -> float:
        return self.now_s


def timed(model: TimedModel, *, num_blocks: int = 10_000, rows: int = 4096) -> StepCost | None:
    model.allocate_kv(num_blocks)
    return time_steps(cast("Any", model), num_blocks=num_blocks, rows=rows, clock=model.clock)


def model_of(step_s: float, token_s: float) -> TimedModel:
    return TimedModel(step_s, token_s, context_tokens=100_000)


def test_a_step_and_a_prompt_token_cost_what_they_took() -> None:
    model = model_of(0.020, 0.001)
    cost = timed(model)
    assert cost is not None
    assert cost.fixed_ms == pytest.approx(21.0)  # of an answer, whose token is in it
    tokens = model.steps[-1][0]
    assert cost.prefill_ms == pytest.approx((tokens - 1) / tokens)
    assert (cost.context_ms, cost.row_ms, cost.kv_ms) == (0.0, 0.0, 0.0)  # routers learn these


def test_the_first_forward_which_finds_everything_cold_does_not_count() -> None:
    model = model_of(0.020, 0.001)
    cost = timed(model)
    assert cost is not None
    assert cost.fixed_ms < 1e3 * COLD_S
    assert model.steps[:2] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 1e-1])
def test_the_longest_prompt_is_about_as_long_as_there_is_time_for(token_s: float) -> None:
    model = model_of(0.0, token_s)
    assert timed(model) is not None
    first, last = model.steps[2][0], model.steps[3][0]
    assert first == FIRST_TOKENS
    if first * token_s < LIMIT_S:
        assert last * token_s <= LIMIT_S * 1.001
        assert last == 4096 or last * token_s > 0.9 * LIMIT_S
    else:
        assert last == first, "no longer than the one that took too long"


@pytest.mark.parametrize(
    ("num_blocks", "rows", "most"), [(3, 4096, 12), (10_000, 5, 5), (1, 1, 1), (10_000, 64, 64)]
)
def test_no_step_is_larger_than_cache_or_step_allow(num_blocks: int, rows: int, most: int) -> None:
    model = model_of(0.001, 0.0)
    assert timed(model, num_blocks=num_blocks, rows=rows) is not None
    assert max(tokens for tokens, _ in model.steps) == most
    assert max(context for _, context in model.steps) <= num_blocks * model.block_tokens


def test_no_prompt_is_longer_than_the_context() -> None:
    model = TimedModel(0.001, 0.0, context_tokens=40)
    assert timed(model) is not None
    assert max(tokens for tokens, _ in model.steps) == 40


def test_a_prompt_that_took_no_longer_than_an_answer_has_tokens_for_nothing() -> None:
    cost = timed(model_of(0.010, 0.0))
    assert cost is not None
    assert (cost.fixed_ms, cost.prefill_ms) == (pytest.approx(10.0), pytest.approx(0.0))


@pytest.mark.parametrize("clock", [lambda: 5.0, iter(np.arange(0, -100, -1.0)).__next__])
def test_a_clock_that_stands_still_or_runs_back_tells_nothing(clock: Callable[[], float]) -> None:
    model = model_of(1.0, 1.0)
    model.allocate_kv(100)
    assert time_steps(cast("Any", model), num_blocks=100, rows=64, clock=clock) is None


def test_no_gradients_are_kept() -> None:
    model = model_of(0.001, 0.0)
    timed(model)
    assert model.graded
    assert all(model.graded)


def test_a_forward_that_fails_fails_the_start() -> None:
    model = model_of(0.001, 0.0)
    model.fail_next = MemoryError("no memory")
    with pytest.raises(MemoryError, match="no memory"):
        timed(model)

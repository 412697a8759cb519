"""When the next step is prepared: from how long steps took.

The numbers are by hand: nine tenths of what a step is expected to take, less 2 ms, less twice what preparing takes, of
which one eighth of the newest counts.
"""

from __future__ import annotations

import pytest

from headrace.engine.result import StepResult
from headrace.worker.step_timer import StepTimer

ANSWERS = StepResult(decode_rows=8)
PROMPT = StepResult(prefill_tokens=100)
BOTH = StepResult(decode_rows=8, prefill_tokens=100)


def test_where_nothing_is_known_it_is_prepared_at_once() -> None:
    for step in (ANSWERS, PROMPT, BOTH):
        assert StepTimer().prepare_after_s(step) == 0


def test_it_is_prepared_shortly_before_the_end() -> None:
    step_timer = StepTimer()
    for _ in range(3):
        step_timer.ended(ANSWERS, 0.040)
        step_timer.ended(PROMPT, 0.200)
    assert step_timer.prepare_after_s(ANSWERS) == pytest.approx(0.034)
    assert step_timer.prepare_after_s(PROMPT) == pytest.approx(0.178)
    assert step_timer.prepare_after_s(BOTH) == pytest.approx(0.214)
    step_timer.prepared(0.008)
    assert step_timer.prepare_after_s(ANSWERS) == pytest.approx(0.032)  # 8 ms / 8, twice


def test_steps_too_short_to_wait_for_are_followed_at_once() -> None:
    step_timer = StepTimer()
    step_timer.ended(ANSWERS, 0.001)
    assert step_timer.prepare_after_s(ANSWERS) == 0


def test_it_follows_steps_that_become_longer() -> None:
    step_timer = StepTimer()
    step_timer.ended(ANSWERS, 0.010)
    for _ in range(60):
        step_timer.ended(ANSWERS, 0.030)
    assert step_timer.prepare_after_s(ANSWERS) == pytest.approx(0.025, rel=0.01)


def test_a_mixed_step_shorter_than_one_of_answers_only_makes_prompts_free() -> None:
    step_timer = StepTimer()
    step_timer.ended(ANSWERS, 0.050)
    step_timer.ended(BOTH, 0.040)
    assert step_timer.prepare_after_s(PROMPT) == 0

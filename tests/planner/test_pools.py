"""Prompts and answers on their way through pools, second by second worked out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.fleet.decode_pool import last_tokens_s
from headrace.planner.fleet.prefill_pool import first_tokens_s


def token_ms(tokens: int, _prompt: int, _behind: int, _balance: float) -> float:
    """A second for each ten tokens on the busiest rank."""
    return 100.0 * tokens


def test_prompts_of_a_group_wait_for_the_step_and_for_the_slowest_rank() -> None:
    prompts = [(0.0, 10, 0), (0.5, 20, 0), (0.6, 10, 0), (0.7, 10, 0)]
    done = first_tokens_s(prompts, groups=1, ranks=2, step_tokens=20, step_ms=token_ms)
    # the first alone until 1; then 20 on one rank and 10 + 10 on the other, until 3
    assert done == [1.0, 3.0, 3.0, 3.0]


def test_long_prompts_are_computed_in_parts_behind_themselves() -> None:
    seen: list[tuple[int, int, int, float]] = []

    def step_ms(tokens: int, prompt: int, behind: int, balance: float) -> float:
        seen.append((tokens, prompt, behind, balance))
        return 1000.0

    done = first_tokens_s([(0.0, 25, 7)], groups=1, ranks=4, step_tokens=10, step_ms=step_ms)
    assert done == [3.0]
    assert seen == [(10, 10, 7, 0.25), (10, 10, 17, 0.25), (5, 5, 27, 0.25)]


def test_a_prompt_goes_where_the_fewest_tokens_are() -> None:
    prompts = [(0.0, 10, 0), (0.1, 40, 0), (0.2, 10, 0), (0.3, 5, 0)]
    done = first_tokens_s(prompts, groups=2, ranks=1, step_tokens=100, step_ms=token_ms)
    # the second goes to the idle group; the others wait for the first, and share a step from 1 to 2.5
    assert done == pytest.approx([1.0, 4.1, 2.5, 2.5])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_every_prompt_is_computed_after_it_came(seed: int, groups: int) -> None:
    draw = random.Random(seed)
    at = 0.0
    prompts: list[tuple[float, int, int]] = []
    for _ in range(30):
        at += draw.expovariate(2)
        prompts.append((at, draw.randint(1, 50), draw.randint(0, 5)))
    done = first_tokens_s(prompts, groups=groups, ranks=2, step_tokens=16, step_ms=token_ms)
    assert all(
        end >= at + tokens / 10 - 1e-9 for end, (at, tokens, _) in zip(done, prompts, strict=True)
    )
    # no work is lost or done twice: the pool is never quicker than all ranks at once
    assert max(done) >= sum(tokens for _, tokens, _ in prompts) / 10 / (2 * groups)


def one_second(_rows: int, _context: float) -> float:
    return 1000.0


def test_rows_get_on_together_and_slower_the_more_there_are() -> None:
    def a_second_a_row(rows: int, _context: float) -> float:
        return 1000.0 * rows

    # alone for 2 tokens, then both at half the speed: the first has 2 left, the second 4
    answers = [(0.0, 5, 4), (2.0, 5, 4)]
    ended = last_tokens_s(answers, ranks=1, kv_tokens=100, row_ms=a_second_a_row)
    assert ended == pytest.approx([6.0, 8.0])
    # on two ranks each has its own
    ended = last_tokens_s(answers, ranks=2, kv_tokens=100, row_ms=a_second_a_row)
    assert ended == pytest.approx([4.0, 6.0])


def test_answers_wait_for_room_to_their_end() -> None:
    answers = [(0.0, 6, 4), (1.0, 6, 4), (1.5, 1, 1)]
    ended = last_tokens_s(answers, ranks=1, kv_tokens=15, row_ms=one_second)
    # the second waits until the first frees its 10 tokens, and nobody overtakes it
    assert ended == pytest.approx([4.0, 8.0, 5.0])


def test_the_mean_context_grows_with_the_answers() -> None:
    seen: list[tuple[int, float]] = []

    def row_ms(rows: int, context: float) -> float:
        seen.append((rows, context))
        return 1000.0

    last_tokens_s([(0.0, 10, 4), (2.0, 30, 2)], ranks=1, kv_tokens=100, row_ms=row_ms)
    assert seen[:2] == [(1, 10.0), (2, (12 + 30) / 2)]


def test_an_idle_pool_waits_for_the_next_answer() -> None:
    ended = last_tokens_s([(0.0, 1, 1), (9.0, 1, 2)], ranks=3, kv_tokens=9, row_ms=one_second)
    assert ended == pytest.approx([1.0, 11.0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000))
def test_tokens_are_neither_lost_nor_made_up(seed: int) -> None:
    draw = random.Random(seed)
    answers = [(draw.uniform(0, 20), draw.randint(1, 30), draw.randint(1, 30)) for _ in range(25)]
    ended = last_tokens_s(answers, ranks=2, kv_tokens=120, row_ms=one_second)
    # a token a second for every row: an answer takes its tokens, and what it waited
    assert all(end - at >= n - 1e-6 for end, (at, _, n) in zip(ended, answers, strict=True))
    assert all(end > 0 for end in ended)

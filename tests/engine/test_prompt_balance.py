"""Prompts of a group that begin together: when they may, and that nothing else waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import prompt_balance as simulation
from headrace.engine.prompt_balance import PromptBalance
from headrace.engine.step.lockstep import RankLoad
from helpers.engine.drafting_engine import a_submit, plain
from helpers.ranks.thread_group import Member, ThreadGroup
from helpers.ranks.toy_ranks import HeardOnRank, rank_engine, step_to_sleep

DECODES = RankLoad(rows=5)
WAITS = RankLoad(rows=5, waiting_tokens=100)
BEGINS = RankLoad(rows=105, prompt_tokens=100)
GOES_ON = RankLoad(rows=105, prompt_tokens=100, waiting_tokens=50)
IDLE = RankLoad()


def opens(most_rounds: int, *rounds: list[RankLoad]) -> list[bool]:
    balance = PromptBalance(most_rounds)
    found: list[bool] = []
    for loads in rounds:
        balance.agreed(loads)
        found.append(balance.open)
    return found


def test_prompts_begin_once_some_have_waited_long_enough() -> None:
    some = [WAITS, DECODES, DECODES]
    assert opens(3, *[some] * 5) == [False, False, True, False, False]


def test_prompts_begin_as_soon_as_each_rank_has_some() -> None:
    assert opens(9, [WAITS, DECODES], [WAITS, WAITS]) == [False, True]


def test_prompts_begin_beside_those_that_take_more_steps() -> None:
    assert opens(9, [BEGINS, DECODES], [GOES_ON, DECODES]) == [False, True]


def test_nobody_is_waited_for_where_no_rank_decodes() -> None:
    assert opens(9, [RankLoad(waiting_tokens=7), IDLE], [IDLE, IDLE]) == [True, True]


def test_without_rounds_to_wait_prompts_always_begin() -> None:
    assert opens(0, [WAITS, DECODES], [DECODES, DECODES]) == [True, True]


LOADS = st.lists(st.sampled_from([DECODES, WAITS, BEGINS, GOES_ON, IDLE]), min_size=3, max_size=3)


@given(most=st.integers(0, 9), rounds=st.lists(LOADS, max_size=60))
def test_nothing_waits_for_more_rounds_than_that(most: int, rounds: list[list[RankLoad]]) -> None:
    waited, was_open = 0, True
    for loads, is_open in zip(rounds, opens(most, *rounds), strict=True):
        waits = any(load.waiting_tokens and not load.prompt_tokens for load in loads)
        waited = (0 if was_open else waited) + waits
        assert is_open or waited < most
        was_open = is_open


def test_prompts_of_all_ranks_are_computed_in_the_same_rounds() -> None:
    """Each rank decodes, then gets a prompt in a round of its own."""

    def work(member: Member) -> HeardOnRank:
        engine, _ = rank_engine(member, prompt_wait_rounds=6)
        heard = HeardOnRank()
        engine.submit(a_submit(10 + member.rank, max_tokens=40))
        for number in range(5):
            if number == 2 + member.rank:
                engine.submit(a_submit(20 + member.rank))
            heard.hear(engine.step())
        step_to_sleep(engine, heard)
        return heard

    group = ThreadGroup(3)
    for rank, heard in enumerate(group.run(work)):
        for request in (10 + rank, 20 + rank):
            submit = a_submit(request, max_tokens=40) if request < 20 else a_submit(request)
            assert heard.ids(request) == plain(submit)[0]
    began = [
        number
        for number, loads in enumerate(group.members[0].loads)
        if any(load.prompt_tokens for load in loads)
    ]
    assert began == [0, 5]
    assert all(load.prompt_tokens for load in group.members[0].loads[5])


def test_a_group_under_load_gains_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulation of the benchmark, which draws the same requests each time."""
    monkeypatch.setattr(simulation, "ROUNDS", 900)
    monkeypatch.setattr(simulation, "WARM", 300)
    # About those of R1 on an H200.
    cost = simulation.Cost(fixed_ms=20, prefill_ms=0.1, context_ms=0, row_ms=0.15, kv_ms=5e-5)
    found = [simulation.simulate(cost, most, {"sequences": 64}, 8192) for most in (0, 8)]
    at_once, together = (it["tokens_per_s_and_rank"] for it in found)
    assert together > 1.3 * at_once
    assert found[1]["prompt_balance"] > found[0]["prompt_balance"]

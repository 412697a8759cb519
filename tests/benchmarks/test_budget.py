"""The arithmetic of `make bench-budget`: what is counted, what one more costs, and what is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.budget import __main__ as budget
from bench.budget import rules
from bench.budget.counts import NotCountedError, TokensCameTogetherError, callgrind, strace

CALLGRIND = """\
version: 1
creator: callgrind-3.19.0
events: Ir Ge

fl=(1) main.c
fn=(1) router::work
10 100 2
cfn=(2) mi_malloc_aligned
calls=3 0
10 60
cfn=(3) mi_free
calls=3 0
10 30
cfn=(4) write
calls=7 0
10 10

fn=(2)
20 60 1
cfn=(5) mi_heap_malloc_zero
calls=3 0
20 20

fn=(6) router::grow
30 5
cfn=(7) mi_realloc_aligned
calls=2 0
30 50
cfn=(2)
calls=1 0
30 20

totals: 355 5
"""
STRACE = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 50.00    0.010000          10      1000           epoll_wait
 30.00    0.006000          12       500        20 futex
 20.00    0.004000           8       500           writev
------ ----------- ----------- --------- --------- ----------------
100.00    0.020000          10      2000        20 total
"""
ORIGIN = {"commit": "abc", "machine": {"processor": 'a "b"'}}


def test_callgrinds_file_gives_instructions_locked_ones_and_calls_of_the_allocator_from_outside() -> (
    None
):
    assert callgrind(CALLGRIND) == {"instructions": 355, "allocations": 6, "atomics": 5}


def test_callgrind_leaves_zeros_at_the_end_out() -> None:
    assert callgrind(CALLGRIND.replace("355 5", "355"))["atomics"] == 0


def test_straces_summary_gives_calls_and_those_that_wait() -> None:
    assert strace(STRACE) == {"syscalls": 2000, "futexes": 500}


@pytest.mark.parametrize(
    ("parse", "text"),
    [(callgrind, ""), (callgrind, "events: Ir\nfn=(1) x\n"), (strace, ""), (strace, STRACE[:-50])],
)
def test_a_file_that_is_not_whole_is_refused(parse: Any, text: str) -> None:
    with pytest.raises(NotCountedError, match="good order"):
        parse(text)


def test_what_both_lengths_have_cancels() -> None:
    few, many = {"instructions": 1_000_100.0}, {"instructions": 1_000_700.0}
    assert rules.each(few, many, units=3) == {"instructions": 200.0}
    with pytest.raises(ValueError, match="0 units"):
        rules.each(few, many, units=0)


def test_one_pair_of_runs_that_went_wrong_is_no_figure() -> None:
    pairs = [{"instructions": each, "atomics": 9.0} for each in (6_507.0, 4_300.0, 4_200.0)]
    assert rules.middle(pairs) == {"instructions": 4_300.0, "atomics": 9.0}


@pytest.mark.parametrize(("broken", "counts"), [(0, True), (2, True), (3, False)])
def test_a_run_whose_tokens_came_together_is_made_again(
    broken: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter(range(9))

    def run(*_: object) -> dict[str, float]:
        if next(tries) < broken:
            raise TokensCameTogetherError("1,951 events for 2,048 tokens")
        return {"instructions": 1.0}

    monkeypatch.setattr(budget, "one_run", run)
    case = budget.CASES["token"]
    if counts:
        assert budget.counted(case, 64, budget.COUNTERS[0], Path(), Path()) == {"instructions": 1.0}
    else:
        with pytest.raises(TokensCameTogetherError, match="1,951"):
            budget.counted(case, 64, budget.COUNTERS[0], Path(), Path())
    assert next(tries) == min(broken + 1, budget.TRIES)


def test_a_count_is_over_its_budget_only_above_it() -> None:
    budgets = {"token": {"instructions": {"measured": 90.0, "budget": 100.0}}}

    def exceeded(value: float) -> list[str]:
        return rules.over(rules.lines({"token": {"instructions": value}}, budgets))

    assert exceeded(100.0) == []
    assert exceeded(100.5) == ["token: 100 instructions, the budget is 100"]
    assert exceeded(123_456.0) == ["token: 123,456 instructions, the budget is 100"]


def test_what_is_not_measured_and_what_has_no_budget_is_shown_and_not_over() -> None:
    budgets = {"token": {"syscalls": {"measured": 1.0, "budget": 1.5}}}
    found = rules.lines({"token": {"instructions": 7_000.0}}, budgets)
    assert [(line.count, line.measured, line.budget, line.target) for line in found] == [
        ("instructions", 7_000.0, None, 5_000),
        ("syscalls", None, 1.5, None),
    ]
    assert rules.over(found) == []
    text = rules.table(found, {"token": "a token"})
    assert "| a token | instructions | 7,000 | - | 5,000 |" in text
    assert "| a token | syscalls | - | 1.50 | - |" in text


def test_the_part_of_the_documents_is_made_from_the_file_alone() -> None:
    measured = {"token": {"instructions": 8_000.0}}
    text = rules.page(rules.written(measured, ORIGIN), {"token": "a token"})
    assert text.startswith('Commit abc, a "b".\n')
    assert "| a token | instructions | 8,000 | 8,800 | 5,000 |" in text


def test_a_check_fails_without_a_budget_to_hold_a_count_to() -> None:
    budgets = {"token": {"syscalls": {"measured": 1.0, "budget": 1.5}}}

    def verdict(counts: dict[str, float], known: dict[str, Any]) -> list[str]:
        return rules.verdict(rules.lines({"token": counts}, known), known)

    assert verdict({"syscalls": 1.0}, budgets) == []
    assert verdict({"syscalls": 2.0}, budgets) == ["token: 2.00 syscalls, the budget is 1.50"]
    assert verdict({"syscalls": 1.0, "futexes": 0.0}, budgets) == ["token: futexes has no budget"]
    assert "no budgets" in verdict({"syscalls": 1.0}, {})[0]


def test_the_table_marks_what_is_over() -> None:
    found = [rules.Line("token", "syscalls", 2.0, 1.5, None)]
    assert "| 2.00 **over** | 1.50 | - |" in rules.table(found, {})


def test_budgets_that_are_written_are_read_back_with_their_margins() -> None:
    measured = {"token": {"instructions": 8_000.0, "syscalls": 1.0}, "x": {"futexes": -0.01}}
    text = rules.written(measured, ORIGIN)
    budgets = rules.read(text)
    assert budgets["token"]["instructions"] == {"measured": 8_000, "budget": 8_800}
    assert budgets["token"]["syscalls"] == {"measured": 1.0, "budget": 1.45}
    assert budgets["x"]["futexes"]["budget"] == 0.2
    assert rules.over(rules.lines(measured, budgets)) == []
    assert set(budgets) == {"token", "x"}


@pytest.mark.parametrize("count", rules.MARGINS)
def test_a_budget_never_lies_below_what_was_measured(count: str) -> None:
    for measured in (0.0, 0.03, 1.0, 1e6):
        assert rules.budget_of(count, measured) >= measured

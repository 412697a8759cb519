"""What a rank makes of the loads and prices that all ranks tell, turn by turn."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.worker.parallel.rebalance import Rebalancer, _Phase
from headrace.worker.parallel.track_record import Expected
from headrace.worker.parallel.turns import NO_BYTES, Note, Said
from headrace_kernels.moe.gate import WINDOWS, Verdict
from headrace_kernels.moe.moves import ExpertMove
from headrace_kernels.moe.placement import LayerPlacement
from helpers.kernels.expert_ranks import Threads
from helpers.ranks.moving_ranks import EXPERTS, LAYERS, ROWS, Outcome, run_rounds

PLACED = LayerPlacement(EXPERTS, (tuple(range(7)), tuple(range(5, 12))))


def outcome_of(rounds: int = 1) -> Outcome:
    """Rank 0 of two; a window is two rounds."""
    parts = ROWS.tensor_split(2)
    return Threads(2).run(
        lambda transport: run_rounds(transport, [PLACED] * LAYERS, parts, rounds=rounds)
    )[0]


@pytest.fixture
def rebalancer() -> Rebalancer:
    return outcome_of().rebalancer


def said(seconds_per_byte: float = 0.0, body: torch.Tensor = NO_BYTES) -> Said:
    note = Note(seconds_per_byte=seconds_per_byte)
    return Said(turn=0, note=note, body=body)


def test_a_turn_is_due_at_windows_while_something_is_under_way_and_after_one_that_was_missed(
    rebalancer: Rebalancer,
) -> None:
    assert [rebalancer.due(number) for number in range(4)] == [True, False, True, False]
    rebalancer._turns.missed = True
    assert rebalancer.due(1)
    rebalancer._turns.missed = False
    for phase in (_Phase.PROBE, _Phase.WEIGH, _Phase.MOVE):
        rebalancer._phase = phase
        assert rebalancer.due(1)


def test_loads_are_those_since_they_were_told_last(rebalancer: Rebalancer) -> None:
    def told() -> tuple[list[float], list[float]]:
        data = rebalancer._statistics().numpy().tobytes()
        counts = np.frombuffer(data, "<i8", EXPERTS * LAYERS).reshape(LAYERS, -1).sum(1)
        return counts.tolist(), np.frombuffer(data, "<f8", LAYERS, 8 * EXPERTS * LAYERS).tolist()

    counts, seconds = told()
    assert min(counts) > 0
    assert min(seconds) > 0.0
    assert told() == ([0] * LAYERS, [0.0] * LAYERS)


def test_the_price_of_a_byte_is_that_of_the_slowest_rank_and_stays_while_layers_are_weighed() -> (
    None
):
    rebalancer = outcome_of(2).rebalancer
    assert len(rebalancer._windows) == 1
    rebalancer._take_prices([said(1e-9), said(3e-9)])
    of_row, of_byte = rebalancer._prices
    assert of_byte == 3e-9
    assert of_row > 0.0
    rebalancer._record.trust = 0.5
    rebalancer._take_prices([said(2e-9), said(1e-9)])
    assert rebalancer._prices == (pytest.approx(of_row / 2), 2e-9)
    rebalancer._verdicts = [a_verdict(1.0, 1.0)]
    rebalancer._take_prices([said(9.0), said(9.0)])
    assert rebalancer._prices[1] == 2e-9


@pytest.mark.parametrize(
    ("prices", "phase"),
    [((1e-9, 1e-9), _Phase.WEIGH), ((1e-9, 0.0), _Phase.PROBE), ((0.0, 0.0), _Phase.PROBE)],
)
def test_changes_are_weighed_once_there_are_windows_and_every_rank_has_measured(
    rebalancer: Rebalancer, prices: tuple[float, float], phase: _Phase
) -> None:
    rebalancer._windows.clear()
    done = rebalancer.done.windows
    for number in range(1, WINDOWS + 1):
        assert rebalancer._phase is _Phase.GATHER
        body = rebalancer._statistics()
        rebalancer._take_statistics([said(price, body) for price in prices])
        assert rebalancer.done.windows == done + number
    assert rebalancer._phase is phase


def test_no_change_is_weighed_before_it_is_known_what_came_of_the_last_one(
    rebalancer: Rebalancer,
) -> None:
    rebalancer._windows.clear()
    rebalancer._record.changed({0: Expected(before_s=1.0, saved_s=0.4)})
    for _ in range(WINDOWS):
        body = rebalancer._statistics()  # without rows: such windows tell nothing
        rebalancer._take_statistics([said(1e-9, body)] * 2)
    assert rebalancer._record.open
    assert rebalancer._phase is _Phase.GATHER


WAVES = ((ExpertMove(rank=1, slot=6, expert=0, source=0, source_slot=0),),)


def a_verdict(gain_s: float, cost_s: float) -> Verdict:
    return Verdict(
        gain_s=gain_s, window_s=gain_s / 2, cost_s=cost_s, before=0.5, after=0.1, waves=WAVES
    )


def test_layers_that_gain_most_move_first_and_all_of_it_is_told() -> None:
    rebalancer = outcome_of(2).rebalancer
    rebalancer._verdicts = [a_verdict(5.0, 1.0), a_verdict(9.0, 2.0)]
    rebalancer._decide(1.0)
    assert [job.layer for job in rebalancer._jobs] == [1, 0]
    assert rebalancer._phase is _Phase.MOVE
    done = rebalancer.done
    assert (done.gain_s, done.cost_s, done.layers_declined) == (14.0, 3.0, 0)
    assert rebalancer._record.open, "what comes of it is looked at"
    both = rebalancer._state
    rebalancer._verdicts = [a_verdict(5.0, 1.0), a_verdict(1.0, 2.0)]
    rebalancer._decide(1.0)
    assert [job.layer for job in rebalancer._jobs] == [0]
    assert (done.gain_s, done.cost_s, done.layers_declined) == (19.0, 4.0, 1)
    assert len({0, both, rebalancer._state}) == 3, "another plan is another digest"
    rebalancer._verdicts = [a_verdict(1.0, 1.0)] * 2
    rebalancer._decide(1.0)
    assert (rebalancer._phase, len(rebalancer._jobs)) == (_Phase.GATHER, 0)
    assert done.layers_declined == 3


def test_what_is_expected_is_of_the_busiest_rank_and_as_if_it_were_trusted() -> None:
    rebalancer = outcome_of(2).rebalancer
    rows = rebalancer._rows().sum(1)
    busiest = rebalancer._seconds.max(1)
    rebalancer._record.trust = 0.5
    expected = rebalancer._expected([(1, a_verdict(6.0, 1.0))])
    assert list(expected) == [1]
    assert expected[1].before_s == pytest.approx(busiest[1] / rows[1])
    assert expected[1].saved_s == pytest.approx(3.0 / rows[1] / 0.5)


def test_a_plan_that_ranks_differ_in_and_a_refusal_are_forgotten_with_what_was_hoped_of_them() -> (
    None
):
    rebalancer = outcome_of(2).rebalancer
    for refused in (False, True):
        rebalancer._verdicts = [a_verdict(5.0, 1.0), a_verdict(9.0, 2.0)]
        rebalancer._windows.extend([rebalancer._windows[-1]] * 2)
        rebalancer._decide(1.0)
        assert rebalancer._record.open
        if refused:
            rebalancer._take_pieces([said(), replace(said(), note=Note(refuses=True))])
        else:
            rebalancer._diverged([said(), said()])
            assert len(rebalancer._windows) == 0, "ranks may have seen other loads"
            rebalancer._windows.append(np.ones((LAYERS, 2, EXPERTS)))
        assert not rebalancer._record.open
        assert (rebalancer._phase, rebalancer._state) == (_Phase.GATHER, 0)
    assert (rebalancer.done.diverged, rebalancer.done.cancelled) == (1, 1)

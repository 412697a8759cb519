"""The gate: a change pays by what steps would have waited less, and moving never costs more than it gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_kernels.moe.balance import GroupShape, balanced_slots, layer_placements
from headrace_kernels.moe.gate import (
    MOST_PERSISTENCE,
    WINDOWS,
    Prices,
    persistence,
    rows_of_ranks,
    seconds_per_row,
    weigh,
)
from headrace_kernels.moe.moves import after_wave
from headrace_kernels.moe.placement import LayerPlacement
from helpers.kernels.expert_ranks import random_placement

EXPERTS, RANKS, SLOTS = 32, 8, 5
SHAPE = GroupShape(ranks=RANKS, slots=SLOTS)
PRICES = Prices(seconds_per_row=1e-6, seconds_per_byte=1e-9, slot_bytes=100_000)
Counts = NDArray[np.float64]


def even() -> LayerPlacement:
    return layer_placements(balanced_slots(np.ones((1, EXPERTS)), SHAPE), EXPERTS)[0]


def skewed(seed: int, rows: int = 40_000) -> Counts:
    """Rows of each expert from each rank."""
    random = np.random.default_rng(seed)
    share = 1 + random.pareto(1.2, EXPERTS)
    return random.multinomial(rows // RANKS, share / share.sum(), RANKS).astype(np.float64)


def steady(counts: Counts) -> Counts:
    return np.stack([counts] * WINDOWS)


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 100))
def test_rows_come_to_the_ranks_that_dispatch_sends_them_to(
    ranks: int, spare: int, seed: int
) -> None:
    placement = random_placement(9, ranks, spare, seed)
    counts = np.random.default_rng(seed).integers(0, 50, (ranks, 9)).astype(np.float64)
    want = np.zeros(ranks)
    for sender in range(ranks):
        home = placement.replicas_for(sender, torch.device("cpu"))
        for expert in range(9):
            want[int(home.rank[expert])] += counts[sender, expert]
    assert np.array_equal(rows_of_ranks(counts, placement), want)


def test_even_rows_are_left_where_they_are() -> None:
    counts = np.full((RANKS, EXPERTS), 10.0)
    placement = LayerPlacement.even(EXPERTS, RANKS)
    found = weigh(
        steady(counts), placement, GroupShape(ranks=RANKS, slots=4), persistence=0.9, prices=PRICES
    )  # fmt: skip
    assert (found.waves, found.gain_s, found.before, found.pays) == ((), 0.0, 0.0, False)


def test_skewed_rows_pay_and_become_even() -> None:
    counts = skewed(1)
    found = weigh(steady(counts), even(), SHAPE, persistence=0.9, prices=PRICES)
    assert found.pays and found.after < 0.5 * found.before
    placement = even()
    before = rows_of_ranks(counts, placement).max()
    for wave in found.waves:
        placement = after_wave(placement, wave)
    saved = before - rows_of_ranks(counts, placement).max()
    assert found.gain_s == pytest.approx(saved * PRICES.seconds_per_row * 0.81 / 0.19)


@pytest.mark.parametrize(
    ("change", "lasts"),
    [
        ({"seconds_per_byte": 1e-5}, 0.9),  # a slow network
        ({"slot_bytes": 10**9}, 0.9),
        ({"seconds_per_row": 0.0}, 0.9),  # weights set the time, not rows
        ({"seconds_per_row": 1e-11}, 0.9),
        ({}, 0.0),  # loads of which nothing is left in the next window
    ],
)
def test_what_costs_more_than_it_gives_is_declined(change: dict[str, float], lasts: float) -> None:
    counts, prices = skewed(1), replace(PRICES, **change)
    found = weigh(steady(counts), even(), SHAPE, persistence=lasts, prices=prices)
    assert not found.pays


def test_dearer_moves_are_fewer() -> None:
    counts = skewed(2)
    prices = [replace(PRICES, seconds_per_byte=price) for price in (1e-12, 1e-9, 3e-8)]
    found = [weigh(steady(counts), even(), SHAPE, persistence=0.5, prices=one) for one in prices]
    moves = [sum(map(len, verdict.waves)) for verdict in found]
    assert moves[0] >= moves[1] >= moves[2]
    assert moves[0] > moves[2]


def test_the_slope_is_of_rows_and_not_of_what_each_layer_takes_anyway() -> None:
    random = np.random.default_rng(5)
    rows = random.integers(0, 1000, (6, RANKS)).astype(np.float64)
    seconds = 3e-6 * rows + random.uniform(0, 1, (6, 1))
    assert seconds_per_row(rows, seconds) == pytest.approx(3e-6)
    assert seconds_per_row(rows, np.full_like(rows, 0.25)) == 0.0
    assert seconds_per_row(rows, -seconds) == 0.0
    assert seconds_per_row(np.ones_like(rows), seconds) == 0.0
    # Where ranks have nearly as many rows, the slope of noise is no price: a row costs no more than all do on average.
    close = np.array([[1000.0, 1001.0]])
    assert seconds_per_row(close, np.array([[1.0, 1.5]])) == pytest.approx(2.5 / 2001)


def test_persistence_is_the_part_of_the_skew_that_stays() -> None:
    now = np.array([[4.0, 2.0, 2.0, 0.0], [8.0, 0.0, 0.0, 0.0]])
    flat = np.ones_like(now)
    half = (now + now.mean(1, keepdims=True)) / 2
    for windows, part in (
        ([now, 3 * now, now], MOST_PERSISTENCE),
        ([now, flat], 0.0),
        ([now, now[:, ::-1]], 0.0),
        ([np.zeros_like(now), now], 0.0),
        ([now, half], 0.5),
        ([now], 0.0),
    ):
        assert persistence(np.stack(windows)) == pytest.approx(part)


def test_a_change_is_good_for_the_worst_window_too() -> None:
    counts = skewed(1)
    windows = steady(counts)
    windows[1] = counts[:, ::-1]  # other experts were busy then
    found = weigh(windows, even(), SHAPE, persistence=0.9, prices=PRICES)
    alike = weigh(steady(counts), even(), SHAPE, persistence=0.9, prices=PRICES)
    assert found.gain_s < alike.gain_s / 2
    assert not weigh(windows[2:], even(), SHAPE, persistence=0.9, prices=PRICES).waves


def over_many_windows(lasts: float, seconds_per_byte: float, seed: int) -> tuple[float, float]:
    """What steps waited less than without moves, and what all moves cost, where loads stay, drift or jump."""
    random = np.random.default_rng(seed)
    prices = replace(PRICES, seconds_per_byte=seconds_per_byte)
    still = placement = even()
    log_share = random.normal(0, 1, EXPERTS)
    windows: list[Counts] = []
    saved = cost = 0.0
    for _ in range(60):
        log_share = lasts * log_share + (1 - lasts**2) ** 0.5 * random.normal(0, 1, EXPERTS)
        share = np.exp(log_share)
        counts = random.multinomial(5000, share / share.sum(), RANKS).astype(np.float64)
        waited = [rows_of_ranks(counts, one).max() for one in (still, placement)]
        saved += (waited[0] - waited[1]) * prices.seconds_per_row
        windows = [*windows, counts][-WINDOWS:]
        seen = np.stack(windows)
        left = persistence(seen.sum(1)[:, None])
        found = weigh(seen, placement, SHAPE, persistence=left, prices=prices)
        if found.pays:
            cost += found.cost_s
            for wave in found.waves:
                placement = after_wave(placement, wave)
    return saved, cost


@pytest.mark.parametrize(
    ("lasts", "seconds_per_byte", "moves"),
    [
        (1.0, 1e-10, True),
        (1.0, 1e-8, True),
        (1.0, 1e-7, True),
        (0.9, 1e-10, True),
        (0.9, 1e-8, True),
        (0.9, 1e-7, False),
        (0.5, 1e-8, False),
        (0.0, 1e-10, False),
    ],
)
def test_over_many_windows_moving_gives_more_than_it_costs(
    lasts: float, seconds_per_byte: float, moves: bool
) -> None:
    for seed in (0, 1):
        saved, cost = over_many_windows(lasts, seconds_per_byte, seed)
        assert saved >= cost
        assert (cost > 0) == moves

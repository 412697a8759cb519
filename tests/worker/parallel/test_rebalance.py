"""Experts move between steps: to the bits of one rank before, during and after, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.worker.parallel.rebalance import Rebalancer
from headrace.worker.parallel.rebalanced import RebalanceConfig
from headrace.worker.parallel.turns import HEADER
from headrace_kernels.moe.balance import GroupShape
from headrace_kernels.moe.gate import rows_of_ranks
from headrace_kernels.moe.placement import LayerPlacement
from helpers.kernels.expert_ranks import Threads, ThreadTransport
from helpers.ranks.moving_ranks import (
    EXPERTS,
    LAYERS,
    ROWS,
    Faults,
    FaultyTransport,
    Model,
    Outcome,
    run_rounds,
)

ROUNDS = 60
# Experts 0 and 1 take most rows, and are on rank 0 alone.
RANKS = {
    2: LayerPlacement(EXPERTS, (tuple(range(7)), tuple(range(5, 12)))),
    4: LayerPlacement(EXPERTS, ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9), (9, 10, 11, 4))),
}


def moved(
    ranks: int = 4,
    *,
    dtype: str = "float32",
    rounds: int = ROUNDS,
    faults: Faults | None = None,
    change: Callable[[Rebalancer], None] | None = None,
    piece_bytes: int = 2000,
) -> list[Outcome]:
    parts = ROWS.tensor_split(ranks)
    return Threads(ranks).run(
        lambda transport: run_rounds(
            transport, [RANKS[ranks]] * LAYERS, parts, rounds=rounds, dtype=dtype, faults=faults, change=change,
            piece_bytes=piece_bytes,
        )
    )  # fmt: skip


def check_bits(outcomes: list[Outcome], dtype: str = "float32") -> None:
    """Every answer is that of one rank, ranks agree on placements, and each slot has the bits of a load."""
    alone = Model(dtype)(ROWS)
    for answers in zip(*(outcome.answers for outcome in outcomes), strict=True):
        assert torch.equal(torch.cat(answers), alone)
    assert all(outcome.placements == outcomes[0].placements for outcome in outcomes)
    everything = alone_with_slots(dtype).slot_images()
    for rank, outcome in enumerate(outcomes):
        for layer, images in enumerate(outcome.model.slot_images()):
            held = outcome.model.placed[layer].placement.ranks[rank]
            for expert, image in zip(held, images, strict=True):
                assert torch.equal(image, everything[layer][expert])


def alone_with_slots(dtype: str) -> Model:
    """All experts in one rank, in order."""
    placement = LayerPlacement(EXPERTS, (tuple(range(EXPERTS)),))
    alone = FaultyTransport(ThreadTransport(Threads(1), 0), Faults())
    return Model(dtype, [placement] * LAYERS, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_move_and_no_bit_changes(ranks: int, dtype: str) -> None:
    outcomes = moved(ranks, dtype=dtype)
    check_bits(outcomes, dtype)
    done = outcomes[0].rebalancer.done
    assert done.layers_changed > 0 and done.gain_s > 2 * done.cost_s > 0
    seen = {tuple(placements) for placements in outcomes[0].placements}
    assert len(seen) > 2  # answers came before, between waves, and after
    for outcome in outcomes:
        assert outcome.rebalancer.done.experts_moved == done.experts_moved
        assert (outcome.rebalancer.done.cancelled, outcome.rebalancer.done.diverged) == (0, 0)
        assert outcome.rebalancer.done.waves == done.waves > 0
    changed = sum(outcome.rebalancer.done.slots_changed for outcome in outcomes)
    assert changed == done.experts_moved, "each move fills a slot of one rank"
    image = outcomes[0].model.placed[0].slot_bytes
    sent = sum(outcome.rebalancer.done.bytes_sent for outcome in outcomes)
    underway = ranks * image  # of a wave that the last round cut off
    assert 0 <= sent - done.experts_moved * image <= underway


def test_the_busiest_rank_gets_less() -> None:
    outcomes = moved(4)
    for layer, placement in enumerate(outcomes[0].placements[-1]):
        counts = np.stack([outcome.model.placed[layer].counts() for outcome in outcomes])
        rows = [rows_of_ranks(counts.astype(np.float64), one) for one in (RANKS[4], placement)]
        assert rows[0].argmax() == 0
        assert rows[1].max() < 0.8 * rows[0].max()


@pytest.mark.parametrize("piece_bytes", [700, 10**6])
def test_pieces_and_room_are_bounded(piece_bytes: int) -> None:
    outcomes = moved(4, piece_bytes=piece_bytes)
    check_bits(outcomes)
    for outcome in outcomes:
        image = outcome.model.placed[0].slot_bytes
        counts = 8 * LAYERS * (EXPERTS + 1)
        most = 4 * 64 + max(4 * counts, 4 * min(piece_bytes, image))
        assert outcome.transport.most_bytes <= most
        assert len(outcome.rebalancer._staged) <= image  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_turn_that_a_rank_misses_is_taken_before_anything_is_computed(rank: int) -> None:
    """At each exchange of a move, so also where all others change their slots and this rank does not learn of it."""
    for at in range(7 + rank % 2, 16, 2):
        faults = Faults(misses=lambda on, exchange, at=at: (on, exchange) == (rank, at))
        outcomes = moved(4, rounds=24, faults=faults, piece_bytes=10**6)
        check_bits(outcomes)
        assert outcomes[0].transport.exchanges > at
        assert outcomes[0].rebalancer.done.experts_moved > 0


def test_all_ranks_but_one_miss_a_turn_again_and_again() -> None:
    faults = Faults(misses=lambda on, exchange: on != 1 and exchange % 5 in (0, 1))
    outcomes = moved(4, rounds=150, faults=faults, piece_bytes=10**6)
    check_bits(outcomes)
    assert outcomes[1].rebalancer.done.layers_changed > 0


def damage(where: str) -> Faults:
    """What comes to rank 2 of an expert is not what was sent."""

    def one(on: int, data: torch.Tensor) -> torch.Tensor:
        if on != 2 or len(data) < 1000:  # no piece
            return data
        if where == "missing":
            return data[: HEADER.size]
        if where == "short":
            return data[:-1]
        bad = data.clone()
        bad[-1] ^= 1
        return bad

    return Faults(damage=one)


@pytest.mark.parametrize("where", ["missing", "short", "a bit"])
def test_a_piece_that_does_not_come_whole_moves_nothing(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = moved(4, faults=damage(where), rounds=60)
    check_bits(outcomes)
    for outcome in outcomes:
        done = outcome.rebalancer.done
        assert done.cancelled > 0
        # What was whole before is whole now: each wave is done on all ranks or on none.
        assert outcome.placements[-1] == outcomes[0].placements[-1]
    assert "did not come whole" in caplog.text
    assert "rank 2 refused a move of experts" in caplog.text


def test_after_a_refusal_experts_move_again() -> None:
    long = iter(range(10**9))  # parts that come to rank 2

    def once(on: int, data: torch.Tensor) -> torch.Tensor:
        piece = on == 2 and len(data) >= 1000
        return data[:-1] if piece and next(long) == 1 else data  # the first is a probe

    outcomes = moved(4, faults=Faults(damage=once), rounds=100)
    check_bits(outcomes)
    for outcome in outcomes:
        assert outcome.rebalancer.done.cancelled == 1
        assert outcome.rebalancer.done.layers_changed > 0


def test_a_rank_without_room_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **kwargs: object) -> torch.Tensor:
        raise MemoryError("none")

    from headrace.worker.parallel import rebalance

    class Torch:
        empty = staticmethod(no_room)
        uint8 = torch.uint8

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    monkeypatch.setattr(rebalance, "torch", Torch())
    outcomes = moved(4, rounds=40)
    check_bits(outcomes)
    for outcome in outcomes:
        assert outcome.rebalancer.done.cancelled > 0
        assert outcome.rebalancer.done.experts_moved == 0
        assert outcome.placements[-1] == [RANKS[4]] * LAYERS


def test_ranks_that_plan_differently_move_nothing() -> None:
    def change(rebalancer: Rebalancer) -> None:
        decide = rebalancer._decide  # pyright: ignore[reportPrivateUsage]

        def differently(lasts: float) -> None:
            decide(lasts)
            if rebalancer._transport.rank == 1:  # pyright: ignore[reportPrivateUsage]
                rebalancer._state ^= 5  # pyright: ignore[reportPrivateUsage]

        rebalancer._decide = differently  # pyright: ignore[reportPrivateUsage]

    outcomes = moved(4, rounds=60, change=change)
    check_bits(outcomes)
    for outcome in outcomes:
        assert outcome.rebalancer.done.diverged > 0
        assert outcome.placements[-1] == [RANKS[4]] * LAYERS


def test_even_loads_move_nothing() -> None:
    def change(rebalancer: Rebalancer) -> None:
        rebalancer._seconds_per_byte = 1e3  # pyright: ignore[reportPrivateUsage]

    outcomes = moved(4, rounds=40, change=change)
    check_bits(outcomes)
    for outcome in outcomes:
        done = outcome.rebalancer.done
        assert (done.layers_changed, done.bytes_sent, done.layers_declined > 0) == (0, 0, True)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (GroupShape(ranks=4, slots=5), "not 5 each"),
        (GroupShape(ranks=4, slots=2), "12 experts in 4 x 2 slots"),
    ],
)
def test_a_shape_that_is_not_that_of_the_layers_is_refused(shape: GroupShape, text: str) -> None:
    outcome = moved(4, rounds=1)[0]
    with pytest.raises(ValueError, match=text):
        Rebalancer(outcome.transport, outcome.model.placed, RebalanceConfig(shape=shape))
    with pytest.raises(ValueError, match="a piece a byte"):
        RebalanceConfig(shape=shape, piece_bytes=0)

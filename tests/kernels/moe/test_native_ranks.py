"""Rows that a program exchanges by itself: the bits of the `Dispatch` in Python, and of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from headrace import _core
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine, Dispatch, Routed
from headrace_kernels.moe.placed import PlacedDispatch
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import NativeTransport, Transport
from helpers.kernels.expert_ranks import random_placement
from helpers.ranks.expert_layer import Called, ExpertLayer, PlacedExperts
from helpers.ranks.processes import Place, RankProcesses, rank_processes
from helpers.ranks.scenes import opened

CPU = torch.device("cpu")
SEEDS = range(6)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def placement_of(layer: ExpertLayer, seed: int) -> LayerPlacement:
    ranks = len(layer.rows)
    spare = seed % 3 if ranks > 1 else 0
    return random_placement(layer.experts, ranks, spare=spare, seed=seed)


def dispatch_of(place: LayerPlacement, transport: Transport, combine: Combine) -> Dispatch:
    return AllToAll.of(place, transport, combine, CPU)


# Which ranks go by Python: none, all, or some, as parcels are the same.
BY_PYTHON: list[Callable[[int], bool]] = [
    lambda _: False,
    lambda _: True,
    lambda rank: rank % 2 > 0,
]


def each_way(place: Place, dtype: str, combine: Combine) -> list[list[list[list[float]]]]:
    """Of layers of several sizes, the results of each way."""
    found: list[list[list[list[float]]]] = []
    with opened(place, "shared_memory", slice_bytes=4096) as transport:
        for seed in SEEDS:
            layer = ExpertLayer.random(seed, place.ranks)
            placement = placement_of(layer, seed)
            ways: list[list[list[float]]] = []
            for number, by_python in enumerate(BY_PYTHON, 1):
                transport.begin(10 * seed + number)
                dispatch = dispatch_of(placement, transport, combine)
                if by_python(place.rank):
                    dispatch = Called(dispatch)
                held = placement.ranks[place.rank]
                experts = PlacedExperts(layer, dtype, held, dispatch)
                ways.append(experts.run(layer.rows_of(place.rank)))
            found.append(ways)
    return found


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize(
    ("number", "dtype"), [(1, "float32"), (2, "int8"), (3, "bfloat16"), (4, "float32")]
)
def test_programs_have_the_bits_of_the_dispatch_in_python(
    ranks: RankProcesses, number: int, dtype: str, combine: str
) -> None:
    answers = ranks.run(each_way, number, dtype, combine)
    for seed in SEEDS:
        for answer in answers:
            native, *others = answer[seed]
            assert all(other == native for other in others), seed
        if combine == "exact":
            together = [row for answer in answers for row in answer[seed][0]]
            assert together == ExpertLayer.random(seed, number).alone(dtype), seed


def moving(place: Place) -> list[list[list[float]]]:
    """The experts of a layer go round the ranks between two passes."""
    layer = ExpertLayer(hidden=64, width=32, experts=8, top_k=3, rows=(40, 3))
    found: list[list[list[float]]] = []
    with opened(place, "shared_memory") as transport:
        placed = LayerPlacement.even(8, place.ranks)
        dispatch = PlacedDispatch(
            placed, partial(dispatch_of, transport=transport, combine="exact")
        )
        experts = PlacedExperts(layer, "int8", placed.ranks[place.rank], dispatch)
        for number in (1, 2, 3):
            transport.begin(number)
            found.append(experts.run(layer.rows_of(place.rank)))
            placed = LayerPlacement(8, (*placed.ranks[1:], placed.ranks[0]))
            experts.hold(placed.ranks[place.rank])
            dispatch.place(placed)
        assert dispatch.clock.seconds > 0.0, "slots are timed"
        assert transport.waited_s > 0.0  # pyright: ignore[reportAttributeAccessIssue]
    return found


def test_rows_follow_experts_that_move(ranks: RankProcesses) -> None:
    layer = ExpertLayer(hidden=64, width=32, experts=8, top_k=3, rows=(40, 3))
    first, second = ranks.run(moving, 2)
    for number in range(3):
        assert first[number] + second[number] == layer.alone("int8")


def times(place: Place) -> list[tuple[float, float]]:
    """Of each round, seconds that this rank has waited and that its slots have computed, since it joined."""
    layer = ExpertLayer(hidden=64, width=32, experts=8, top_k=3, rows=(40, 3))
    found: list[tuple[float, float]] = []
    with opened(place, "shared_memory") as transport:
        assert isinstance(transport, NativeTransport)
        placed = LayerPlacement.even(8, place.ranks)
        dispatch = PlacedDispatch(
            placed, partial(dispatch_of, transport=transport, combine="exact")
        )
        experts = PlacedExperts(layer, "int8", placed.ranks[place.rank], dispatch)
        for number in range(1, 13):
            transport.begin(number)
            experts.run(layer.rows_of(place.rank))
            found.append((transport.waited_s, dispatch.clock.seconds))
            assert transport.waits_s == 0.0, "it does not wait any more"
    return found


def test_waits_and_the_time_of_slots_add_up(ranks: RankProcesses) -> None:
    for found in ranks.run(times, 2):
        for totals in zip(*found, strict=True):
            assert all(before < after for before, after in pairwise(totals)), totals


def seen_waiting(place: Place) -> float:
    """How long rank 0 says that it has waited, while it does. Rank 1 comes once that was said."""
    layer = ExpertLayer(hidden=32, width=16, experts=4, top_k=2, rows=(5, 5))
    said = place.folder / "said"
    with opened(place, "shared_memory") as transport, ThreadPoolExecutor(1) as threads:
        assert isinstance(transport, NativeTransport)

        def look() -> float:
            while not (seconds := transport.waits_s):
                os.sched_yield()
            said.touch()
            return seconds

        placed = LayerPlacement.even(4, 2)
        held = placed.ranks[place.rank]
        experts = PlacedExperts(layer, "int8", held, dispatch_of(placed, transport, "exact"))
        transport.begin(1)
        looking = threads.submit(look) if place.rank == 0 else None
        while place.rank == 1 and not said.exists():
            os.sched_yield()
        experts.run(layer.rows_of(place.rank))
        return looking.result() if looking else 0.0


def test_a_rank_says_how_long_it_has_waited_while_it_does(ranks: RankProcesses) -> None:
    first, _ = ranks.run(seen_waiting, 2)
    assert first > 0.0


def calls(place: Place) -> str:
    """A dispatch whose calls are an error."""
    layer = ExpertLayer(hidden=32, width=16, experts=4, top_k=2, rows=(5, 0))

    class NeverCalled(AllToAll):
        def send(self, routed: Routed) -> Any:
            raise AssertionError(f"a program exchanges {len(routed.x)} rows by itself")

    with opened(place, "shared_memory") as transport:
        transport.begin(1)
        placement = LayerPlacement.even(4, 2)
        dispatch = NeverCalled.of(placement, transport, "exact", CPU)
        held = placement.ranks[place.rank]
        PlacedExperts(layer, "float32", held, dispatch).run(layer.rows_of(place.rank))
    return "done"


def test_over_shared_memory_python_is_not_called(ranks: RankProcesses) -> None:
    assert ranks.run(calls, 2) == ["done", "done"]


class Apart(AllToAll):
    """With a number of rows of its own from which own rows are computed by themselves: whatever there is."""

    rows_apart = 0

    def native(self) -> _core.SharedExchange:
        transport: Any = self.transport
        return _core.SharedExchange(
            transport._parcels,
            owners=self.home.rank.numpy(),
            slots=self.home.slot.numpy(),
            partial=self.combine == "partial",
            rows_apart=self.rows_apart,
        )


class FewAtOnce(Apart):
    rows_apart = 4


class AtOnce(Apart):
    rows_apart = 1 << 60


def apart_and_at_once(place: Place, combine: Combine) -> list[list[list[list[float]]]]:
    """Of layers of several sizes, the results of each way. Ranks may differ in it."""
    found: list[list[list[list[float]]]] = []
    with opened(place, "shared_memory", slice_bytes=4096) as transport:
        for seed in SEEDS:
            layer = ExpertLayer.random(seed, place.ranks)
            placement = placement_of(layer, seed)
            mixed = (Apart, AtOnce)[place.rank % 2]
            ways: list[list[list[float]]] = []
            for number, kind in enumerate((AtOnce, Apart, FewAtOnce, mixed), 1):
                transport.begin(10 * seed + number)
                dispatch = kind.of(placement, transport, combine, CPU)
                held = placement.ranks[place.rank]
                experts = PlacedExperts(layer, "int8", held, dispatch)
                ways.append(experts.run(layer.rows_of(place.rank)))
            found.append(ways)
    return found


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_bit_depends_on_which_rows_are_computed_by_themselves(
    ranks: RankProcesses, number: int, combine: str
) -> None:
    answers = ranks.run(apart_and_at_once, number, combine)
    for seed in SEEDS:
        for answer in answers:
            at_once, *others = answer[seed]
            assert all(other == at_once for other in others), seed
        if combine == "exact":
            together = [row for answer in answers for row in answer[seed][0]]
            assert together == ExpertLayer.random(seed, number).alone("int8"), seed

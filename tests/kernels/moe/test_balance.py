"""Placements that even out loads: every expert somewhere, none twice on a rank, whole groups on their nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_kernels.moe.balance import (
    GroupShape,
    Stay,
    balanced_slots,
    imbalance,
    layer_placements,
)

Case = tuple[NDArray[np.float64], GroupShape]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any loads, and any shape of a group that they fit."""
    nodes = draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    members = draw(st.integers(1, 5))
    experts = groups * members
    of_node = experts // nodes
    ranks = nodes * draw(st.integers(1, 5))
    least = -(-experts // ranks)
    slots = draw(st.integers(min(least, of_node), of_node))
    loads = draw(
        st.lists(
            st.lists(
                st.sampled_from([0.0, 1.0, 1.0, 2.0, 7.0, 1000.0]),
                min_size=experts,
                max_size=experts,
            ),
            min_size=1,
            max_size=3,
        )
    )
    shape = GroupShape(ranks=ranks, slots=slots, nodes=nodes, expert_groups=groups)
    return np.array(loads), shape


@given(cases())
def test_every_slot_is_used_and_no_rank_holds_an_expert_twice(case: Case) -> None:
    loads, shape = case
    layers, experts = loads.shape
    slots = balanced_slots(loads, shape)
    assert slots.shape == (layers, shape.ranks, shape.slots)
    for placement in layer_placements(slots, experts):  # which refuses what is missing or twice
        assert [len(held) for held in placement.ranks] == [shape.slots] * shape.ranks
    # The experts of a group are on one node.
    by_node = slots.reshape(layers, shape.nodes, -1) // (experts // shape.expert_groups)
    for layer in by_node:
        groups = [set(node.tolist()) for node in layer]
        assert sum(map(len, groups)) == shape.expert_groups
    assert np.array_equal(balanced_slots(loads.copy(), shape), slots)


@given(cases(), st.sampled_from([-0.1, 0.0, 0.3]))
def test_experts_that_stay_leave_a_whole_placement(case: Case, tolerance: float) -> None:
    loads, shape = case
    layers, experts = loads.shape
    before = balanced_slots(loads[:, ::-1].copy(), shape)
    slots = balanced_slots(loads, shape, Stay(slots=before, tolerance=tolerance))
    for placement in layer_placements(slots, experts):
        assert [len(held) for held in placement.ranks] == [shape.slots] * shape.ranks
    for layer in slots.reshape(layers, shape.nodes, -1) // (experts // shape.expert_groups):
        assert sum(len(set(node.tolist())) for node in layer) == shape.expert_groups


def test_little_moves_where_loads_have_changed_little() -> None:
    random = np.random.default_rng(3)
    shape = GroupShape(ranks=32, slots=9)
    loads = 1 + random.pareto(1.5, (4, 256))
    before = balanced_slots(loads, shape)
    loads = loads * np.exp(random.normal(0, 0.2, loads.shape))
    stay = Stay(slots=before, tolerance=0.0)
    found = {
        name: balanced_slots(loads, shape, kept) for name, kept in (("new", None), ("stay", stay))
    }

    def changed(slots: NDArray[np.int64]) -> int:
        pairs = zip(slots.reshape(-1, 9).tolist(), before.reshape(-1, 9).tolist(), strict=True)
        return sum(len(set(now) - set(then)) for now, then in pairs)

    assert changed(found["stay"]) < changed(found["new"]) / 3
    assert imbalance(loads, found["stay"]).mean() < imbalance(loads, before).mean()
    same = balanced_slots(loads, shape, Stay(slots=found["new"], tolerance=0.1))
    assert changed(same) == changed(found["new"])


def test_a_layer_is_placed_alike_alone_and_among_others() -> None:
    loads = np.random.default_rng(1).pareto(1.5, (6, 32))
    shape = GroupShape(ranks=8, slots=6, nodes=2, expert_groups=4)
    whole = balanced_slots(loads, shape)
    for layer in range(6):
        assert np.array_equal(balanced_slots(loads[layer : layer + 1], shape)[0], whole[layer])


def test_replicas_go_to_the_heaviest_and_loads_are_even() -> None:
    loads = np.array([[8.0, 4.0, 2.0, 2.0]])
    slots = balanced_slots(loads, GroupShape(ranks=4, slots=2))
    assert np.bincount(slots.ravel()).tolist() == [4, 2, 1, 1]
    assert imbalance(loads, slots).tolist() == [0.0]


def test_the_last_replica_finds_a_rank_without_its_expert() -> None:
    # Nobody has a load, so the order of items alone decides: without making way the last ones have nowhere to go.
    for ranks in range(2, 7):
        for experts in range(2, 9):
            for slots in range(-(-experts // ranks), experts + 1):
                shape = GroupShape(ranks=ranks, slots=slots)
                layer_placements(balanced_slots(np.zeros((1, experts)), shape), experts)


def test_imbalance_is_the_heaviest_rank_over_the_mean() -> None:
    loads = np.array([[6.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    slots = np.array([[[0, 1], [2, 3]]] * 2)
    assert imbalance(loads, slots).tolist() == [1 / 3, 0.0]
    with_replica = np.array([[[0, 1, 2], [0, 3, 2]]])
    assert imbalance(loads[:1], with_replica).tolist() == [0.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": 2}, "8 experts in 2 x 3 slots"),
        ({"nodes": 3}, "3 nodes must divide 4 ranks and 2 groups"),
        ({"nodes": 4}, "4 nodes must divide 4 ranks and 2 groups"),
        ({"expert_groups": 3, "nodes": 1}, "3 groups must divide 8 experts"),
        ({"slots": 5}, "5 slots a rank for 4 experts: some would be on a rank twice"),
    ],
)
def test_a_shape_that_cannot_be_is_named(change: dict[str, int], text: str) -> None:
    sizes = {"ranks": 4, "slots": 3, "nodes": 2, "expert_groups": 2} | change
    with pytest.raises(ValueError, match=text):
        balanced_slots(np.ones((1, 8)), GroupShape(**sizes))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_loads_that_are_no_counts_are_refused(bad: float) -> None:
    loads = np.ones((2, 8))
    loads[1, 3] = bad
    with pytest.raises(ValueError, match="loads are counts"):
        balanced_slots(loads, GroupShape(ranks=4, slots=3))

"""Where experts are, and which rows go where: in numbers."""

from __future__ import annotations

from math import comb
from pathlib import Path

import pytest
import torch

from headrace_kernels.moe.dispatch import Combine, in_order_of_sends, plan_sends, plan_sends_ref
from headrace_kernels.moe.placement import LayerPlacement
from helpers.kernels.expert_ranks import random_placement

CPU = torch.device("cpu")


def test_an_even_placement_has_each_expert_once() -> None:
    assert LayerPlacement.even(8, 2).ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert LayerPlacement.even(7, 3).ranks == ((0, 1), (2, 3), (4, 5, 6))
    assert LayerPlacement.even(3, 1).ranks == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (((0, 1), (3,)), "no rank holds expert 2, and 0 more"),
        ((), "no rank holds expert 0, and 3 more"),
        (((0, 1, 2, 3), (4,)), "rank 1: expert 4 of 4"),
        (((-1, 1, 2, 3),), "rank 0: expert -1 of 4"),
        (((0, 1, 2, 3), ()), "rank 1 holds no expert"),
        (((0, 1), (2, 3, 2)), r"rank 1: an expert is in two of its slots: \[2, 3, 2\]"),
    ],
)
def test_a_placement_that_is_none_is_named(ranks: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LayerPlacement(4, ranks)


def test_a_rank_uses_its_own_replica_and_ranks_spread_over_those_of_others() -> None:
    placement = LayerPlacement(3, ((0, 2), (1, 0), (1,), (2,)))
    found = [placement.replicas_for(rank, CPU) for rank in range(4)]
    assert [tuple(home.rank.tolist()) for home in found] == [
        (0, 1, 0),
        (1, 1, 3),
        (0, 2, 0),
        (1, 2, 3),
    ]
    assert found[0].slot.tolist() == [0, 0, 1]
    assert found[3].slot.tolist() == [1, 0, 0]


def test_a_row_goes_once_to_each_rank_that_holds_its_experts() -> None:
    home = LayerPlacement.even(6, 3).replicas_for(0, CPU)
    ids = torch.tensor([[0, 1, 5], [2, 3, 4]], dtype=torch.int32)
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    plan = plan_sends(ids, weights, home, 3, "exact")
    assert plan.rows.tolist() == [0, 1, 0, 1]
    assert plan.counts == [1, 1, 2]
    assert plan.slots.tolist() == [[0, 1, -1], [0, 1, -1], [-1, -1, 1], [-1, -1, 0]]
    assert torch.equal(plan.weights, weights[[0, 1, 0, 1]])
    assert plan.places.tolist() == [[0, 1, 4], [2, 3, 5]]
    assert plan.answers == [2, 2, 2]
    partial = plan_sends(ids, weights, home, 3, "partial")
    assert partial.places.tolist() == [[0, 2, -1], [1, 3, -1]]
    assert partial.answers == [1, 1, 2]


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_places_name_the_results_of_each_row_in_order(ranks: int, combine: Combine) -> None:
    experts, top_k = 12, 4
    placement = random_placement(experts, ranks, spare=5, seed=ranks)
    generator = torch.Generator().manual_seed(ranks)
    ids = torch.rand(9, experts, generator=generator).argsort(1)[:, :top_k].sort(1).values.int()
    home = placement.replicas_for(ranks - 1, CPU)
    plan = plan_sends(ids, torch.rand(9, top_k, generator=generator), home, ranks, combine)
    # Every rank answers with the experts in its slots, as numbers that say what they are.
    answers: list[list[int]] = []
    for held, slots in zip(placement.ranks, plan.slots.split(plan.counts), strict=True):
        for asked in slots.tolist():
            found = [held[slot] for slot in asked if slot >= 0]
            assert found == sorted(found) and found
            answers += [[expert] for expert in found] if combine == "exact" else [found]
    assert len(answers) == sum(plan.answers)
    for row, places in zip(ids.tolist(), plan.places.tolist(), strict=True):
        got = [answers[place] for place in places if place >= 0]
        flat = [expert for answer in got for expert in answer]
        assert sorted(flat) == row
        if combine == "exact":
            assert flat == row  # in the order of experts
        assert places == sorted(places, key=lambda place: place < 0)  # what is missing is last


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_plan_is_that_of_tensor_operations(rows: int, ranks: int, combine: Combine) -> None:
    placement = random_placement(16, ranks, spare=6, seed=rows)
    home = placement.replicas_for(0, CPU)
    draw = torch.Generator().manual_seed(ranks)
    ids = torch.rand(rows, 16, generator=draw).argsort(1)[:, :3].sort(1).values.int()
    weights = torch.rand(rows, 3, generator=draw)
    found = plan_sends(ids, weights, home, ranks, combine)
    due = plan_sends_ref(ids, weights, home, ranks, combine)
    for one, other in zip(found, due, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other


def test_an_expert_that_no_rank_has_is_refused() -> None:
    home = LayerPlacement.even(4, 2).replicas_for(0, CPU)
    for expert in (4, -1):
        ids = torch.tensor([[0, expert]], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"expert {expert} of 4"):
            plan_sends(ids, torch.ones(1, 2), home, 2, "exact")


def ranks_of_a_row(ranks: int) -> float:
    """How many ranks a row of R1 goes to where rows choose evenly, as docs/design/expert_parallelism.md derives it."""
    among = comb(128, 8)
    if ranks == 2:
        taken = [comb(4, g) * comb(4, 4 - g) / comb(8, 4) for g in range(5)]
        return 2 * sum(p * (1 - comb(128 - 32 * g, 8) / among) for g, p in enumerate(taken))
    return ranks / 2 * (1 - comb(128 - 256 // ranks, 8) / among)


def test_the_documented_bytes_are_those_of_the_formulas() -> None:
    text = (Path(__file__).parents[3] / "docs/design/expert_parallelism.md").read_text()
    hidden, top_k = 7168, 8
    rows: dict[str, list[str]] = {}
    for ranks in (2, 8, 32):
        n, away = ranks_of_a_row(ranks), (ranks - 1) / ranks
        bf16 = n * away * (2 * hidden + 8 * top_k) / 1e3
        fp8 = n * away * (hidden + 4 * hidden / 128 + 8 * top_k) / 1e3
        exact, partial = top_k * away * 2 * hidden / 1e3, n * away * 2 * hidden / 1e3
        for name, value in (
            ("ranks that a row goes to, `n`", f"{n:.2f}"),
            ("dispatch in bf16", f"{bf16:.1f}"),
            ("dispatch in FP8", f"{fp8:.1f}"),
            ("combine, exact", f"{exact:.1f}"),
            ("combine, partial", f"{partial:.1f}"),
            ("FP8 dispatch and exact", f"{fp8 + exact:.1f}"),
            ("FP8 dispatch and partial", f"{fp8 + partial:.1f}"),
            ("exact over partial", f"{(fp8 + exact) / (fp8 + partial):.2f}"),
        ):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        assert f"| {name} | {' | '.join(values)} |" in text


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_rows_that_choose_evenly_go_to_as_many_ranks_as_documented(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    rows = 4000
    groups = torch.rand(rows, 8, generator=generator).argsort(1)[:, :4, None] * 32
    experts = (groups + torch.arange(32)).flatten(1)  # those of the groups that are taken
    ids = experts.gather(1, torch.rand(rows, 128, generator=generator).argsort(1)[:, :8])
    home = LayerPlacement.even(256, ranks).replicas_for(0, CPU)
    plan = plan_sends(ids.sort(1).values.int(), torch.ones(rows, 8), home, ranks, "partial")
    # 4,000 rows are off by some 0.03 at most
    assert len(plan.rows) / rows == pytest.approx(ranks_of_a_row(ranks), abs=0.1)
    assert sum(plan.answers) == len(plan.rows)


def test_no_rows_are_no_sends() -> None:
    home = LayerPlacement.even(4, 2).replicas_for(1, CPU)
    for combine in ("exact", "partial"):
        plan = plan_sends(torch.empty(0, 3).int(), torch.empty(0, 3), home, 2, combine)
        assert plan.counts == plan.answers == [0, 0]
        assert plan.slots.shape == (0, 3) and len(plan.places) == 0


def test_results_are_put_into_the_order_of_rows() -> None:
    places = torch.tensor([[2, -1, 0], [-1, 1, -1]], dtype=torch.int32)
    y, back = in_order_of_sends(torch.tensor([[0.0], [1.0], [2.0]]), places, [0, 1, 1])
    assert y.tolist() == [[2], [0], [1]]
    assert back == [0, 2, 1]
    with pytest.raises(ValueError, match="of \\[1\\] rows"):
        in_order_of_sends(y, places, [1])

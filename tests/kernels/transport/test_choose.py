"""All ranks choose the same way for their rows, by what was measured on the slowest of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace_kernels.moe.dispatch import Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import RankLost
from headrace_kernels.transport.choose import (
    FEW_ROWS,
    MANY_ROWS,
    Cost,
    ExpertsShape,
    Meet,
    choose,
    decide,
    slowest,
)
from headrace_kernels.transport.ways import GroupSite, RankWay, ways
from helpers.ranks.processes import Place, RankProcesses, rank_processes

CPU = torch.device("cpu")
SHAPE = ExpertsShape(
    hidden=16, experts=8, top_k=2, dtype=torch.float32, device=CPU, combine="exact"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def cost(few_us: float, many_us: float) -> Cost:
    return Cost(few_us, many_us, row_bytes=64)


def test_the_best_for_few_rows_and_for_many_are_used_where_they_differ() -> None:
    per_row = 504.0 / (MANY_ROWS - FEW_ROWS)
    steep, flat = cost(10.0, 10.0 + 504.0), cost(100.0, 100.0)
    assert per_row == 1.0
    # 2 + 1 a row against 100: the second is better from 99 rows on.
    assert decide({"steep": steep, "flat": flat}) == (("steep", "flat"), 99)
    assert decide({"flat": flat, "slow": cost(101.0, 101.0)}) == (("flat", "flat"), 0)


def test_a_second_way_has_to_be_clearly_better() -> None:
    few = cost(10.0, 1_000.0)
    assert decide({"few": few, "many": cost(11.0, 760.0)}) == (("few", "few"), 0)
    assert decide({"few": few, "many": cost(11.0, 740.0)})[0] == ("few", "many")


def test_equals_go_to_the_first() -> None:
    assert decide({"b": cost(1.0, 2.0), "a": cost(1.0, 2.0)}) == (("b", "b"), 0)


def test_the_slowest_rank_decides() -> None:
    facts = [
        {"times": {"x": [1.0, 7.0], "y": [2.0, 8.0]}},
        {"times": {"x": [3.0, 6.0], "y": [2.5, 9.5]}},
    ]
    costs = slowest(facts, SHAPE, 2)
    assert {name: (one.few_us, one.many_us) for name, one in costs.items()} == {
        "x": (3.0, 7.0),
        "y": (2.5, 9.5),
    }
    assert decide(costs) == (("y", "x"), decide(costs)[1])


def test_a_cost_has_a_part_for_each_exchange_and_one_for_each_row() -> None:
    one = cost(10.0 + FEW_ROWS, 10.0 + MANY_ROWS)
    assert (one.fixed_us, one.us_a_row, one.us(100)) == (10.0, 1.0, 110.0)
    assert cost(5.0, 4.0).us(1_000) == 5.0  # more rows never take less


def board(place: Place) -> Meet:
    """Ranks meet by files."""
    number = 0

    def meet(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        nonlocal number
        number += 1
        files = [place.folder / f"{number}.{rank}" for rank in range(place.ranks)]
        half = files[place.rank].with_suffix(f".{place.rank}.part")
        half.write_text(json.dumps(dict(facts)))
        half.rename(files[place.rank])
        while not all(file.exists() for file in files):
            time.sleep(0.002)
        return [json.loads(file.read_text()) for file in files]

    return meet


def site(place: Place) -> GroupSite:
    store = dist.FileStore(str(place.folder / "store"), place.ranks)
    return GroupSite(
        rank=place.rank,
        ranks=place.ranks,
        one_host=True,
        device=CPU,
        memory=place.memory,
        store=store,
        combine="exact",
        deadline_s=30.0,
        meeting_s=30.0,
    )


def use(place: Place, chosen: Any) -> None:
    """A round of few rows and one of many."""
    dispatch = chosen.dispatch(LayerPlacement.even(8, place.ranks))
    for round_number, rows in ((1, 2), (2, 600)):
        chosen.begin(round_number)
        chosen.expect(rows)
        ids = torch.tensor([[0, 7]], dtype=torch.int32).repeat(rows, 1)
        x = torch.full((rows, 16), float(place.rank))
        received = (sent := dispatch.send(Routed(x, ids, torch.ones(rows, 2)))).receive()
        here = received.slots >= 0
        places = torch.where(here, here.flatten().cumsum(0).view(here.shape) - 1, -1).int()
        returned = sent.collect(torch.ones(int(here.sum()), 16), places)
        assert len(returned.y) == 2 * rows


def choosing(place: Place, forced: str | None) -> dict[str, Any]:
    chosen = choose(
        ways(site(place)),
        SHAPE,
        rank=place.rank,
        ranks=place.ranks,
        meet=board(place),
        forced=forced,
    )
    use(place, chosen)
    chosen.close()
    return chosen.report


@pytest.mark.parametrize("number", [2, 3])
def test_all_ranks_choose_the_same_and_report_each_way(ranks: RankProcesses, number: int) -> None:
    reports = ranks.run(choosing, number, None)
    assert all(report == reports[0] for report in reports)
    assert set(reports[0]["measured"]) == {"shared-memory", "gloo"}
    for figures in reports[0]["measured"].values():
        assert figures[f"us_of_{FEW_ROWS}_rows"] > 0 and figures[f"us_of_{MANY_ROWS}_rows"] > 0


@pytest.mark.parametrize("name", ["shared-memory", "gloo"])
def test_a_way_can_be_forced(ranks: RankProcesses, name: str) -> None:
    for report in ranks.run(choosing, 2, name):
        assert (report["few_rows"], report["many_rows"]) == (name, name)
        assert report["measured"] == {}


def test_a_way_that_is_not_there_cannot_be_forced(ranks: RankProcesses) -> None:
    for answer in ranks.run(choosing, 2, "pigeons"):
        assert answer.kind == "ValueError"
        assert "no transport 'pigeons' here; there is shared-memory, gloo" in answer.text


def broken_on(place: Place, culprit: int, only: bool) -> dict[str, Any]:
    """One rank has no memory for its group."""

    def fails() -> RankWay:
        if place.rank == culprit:
            raise OSError("no room")
        raise RankLost(culprit, "the first meeting")

    offered: dict[str, Callable[[], RankWay]] = dict(ways(site(place)))
    offered["shared-memory"] = fails
    if only:
        del offered["gloo"]
    chosen = choose(offered, SHAPE, rank=place.rank, ranks=place.ranks, meet=board(place))
    use(place, chosen)
    chosen.close()
    return chosen.report


def test_a_way_that_one_rank_cannot_open_is_left_out_with_the_reason(ranks: RankProcesses) -> None:
    for report in ranks.run(broken_on, 2, 0, False):
        assert report["few_rows"] == "gloo"
        assert report["refused"] == {"shared-memory": "rank 0: OSError: no room"}


def test_without_any_way_the_reasons_are_said(ranks: RankProcesses) -> None:
    for answer in ranks.run(broken_on, 2, 0, True):
        assert answer.kind == "ValueError"
        assert "shared-memory: rank 0: OSError: no room" in answer.text


def by_size(place: Place) -> list[bool]:
    """Few rows by one way, many by the other, whichever is faster here."""
    opened = [make() for make in ways(site(place)).values()]
    from headrace_kernels.transport.choose import ChosenWays

    chosen = ChosenWays(("shared-memory", "gloo"), (opened[0], opened[1]), 100, {})
    use(place, chosen)
    chosen.close()
    return [chosen.many]


def test_two_ways_take_turns_by_size(ranks: RankProcesses) -> None:
    assert ranks.run(by_size, 2) == [[True]] * 2

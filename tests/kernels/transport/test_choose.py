"""All ranks choose the same way for their rows, by what was measured on the slowest of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import Arrived, Columns, RankLost, Span
from headrace_kernels.transport.choose import (
    FEW_ROWS,
    MANY_ROWS,
    TURNS,
    ChosenWays,
    Cost,
    Meet,
    choose,
    decide,
    slowest,
)
from headrace_kernels.transport.gpu_ways import NoRounds
from headrace_kernels.transport.ways import ExpertsShape, GroupSite, RankWay, ways
from helpers.ranks.processes import Place, RankProcesses, rank_processes

CPU = torch.device("cpu")
SHAPE = ExpertsShape(
    hidden=16, experts=8, top_k=2, dtype=torch.float32, device=CPU, combine="exact", most_rows=512
)
ANY_WAY = RankWay(NoRounds(), AllToAll.of)  # type: ignore[arg-type]


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
        {"times": {"x": [[1.0], [7.0]], "y": [[2.0], [8.0]]}},
        {"times": {"x": [[3.0], [6.0]], "y": [[2.5], [9.5]]}},
    ]
    costs = slowest(facts, SHAPE, 2)
    assert {name: (one.few_us, one.many_us) for name, one in costs.items()} == {
        "x": (3.0, 7.0),
        "y": (2.5, 9.5),
    }
    assert decide(costs) == (("y", "x"), decide(costs)[1])


def test_a_turn_in_which_a_rank_was_kept_decides_nothing() -> None:
    facts = [
        {"times": {"x": [[90.0, 3.0, 3.1], [8.0, 80.0, 7.0]], "y": [[4.0, 4.1, 4.2], [9.0] * 3]}},
        {"times": {"x": [[2.0, 70.0, 2.0], [60.0, 6.0, 6.0]], "y": [[4.0] * 3, [9.0] * 3]}},
    ]
    costs = slowest(facts, SHAPE, 2)
    assert (costs["x"].few_us, costs["x"].many_us, costs["x"].worst_us) == (3.0, 7.0, (90.0, 80.0))
    assert costs["x"].told()["us_in_the_worst_turns"] == [90.0, 80.0]
    assert decide(costs) == (("x", "x"), 0)


def test_what_routers_are_told_names_the_choice_and_all_that_was_timed() -> None:
    chosen = ChosenWays(("gloo", "gloo"), (ANY_WAY, ANY_WAY), 0, {"measured": {}})
    assert chosen.told == "gloo"
    measured = {"shared-memory": cost(61.4, 1904.0).told(), "gloo": cost(412.0, 22_010.0).told()}
    chosen = ChosenWays(
        ("shared-memory", "shared-memory"), (ANY_WAY, ANY_WAY), 0, {"measured": measured}
    )
    times = "us of 8 and 512 rows: shared-memory 61 1904, gloo 412 22010"
    assert chosen.told == f"shared-memory ({times})"
    many = {f"way-{number}": cost(1.0, 2.0).told() for number in range(40)}
    chosen = ChosenWays(("way-0", "way-1"), (ANY_WAY, ANY_WAY), 9, {"measured": many})
    assert chosen.told == "way-0 and way-1"


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
        shape=SHAPE,
        memory=place.memory,
        store=store,
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
        ways(site(place), forced),
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


@pytest.mark.parametrize("name", ["symmetric-memory", "deep-ep"])
def test_a_way_of_gpus_is_refused_by_name_on_all_ranks(ranks: RankProcesses, name: str) -> None:
    for answer in ranks.run(choosing, 2, name):
        assert answer.kind == "ValueError"
        why = "rank 0: it is for GPUs, and this rank computes on the cpu"
        assert answer.text == f"no rows by --ep-transport {name}: {why}"


def gpu_site(**other: Any) -> GroupSite:
    """On a GPU that is not there."""
    shape = replace(SHAPE, device=torch.device("cuda:0"), dtype=torch.bfloat16, combine="partial")
    shape = replace(shape, **{k: v for k, v in other.items() if k in ("combine", "dtype")})
    site = GroupSite(
        rank=0, ranks=2, one_host=True, shape=shape, memory=Path(), store=dist.HashStore(),
        deadline_s=1.0, meeting_s=1.0,
    )  # fmt: skip
    return replace(site, **{k: v for k, v in other.items() if k not in ("combine", "dtype")})


@pytest.mark.parametrize(
    ("name", "other", "why"),
    [
        ("symmetric-memory", {"one_host": False}, "the ranks are on several machines"),
        ("symmetric-memory", {"carries_experts": True}, "leave --ep-rebalance-rounds out"),
        ("deep-ep", {"carries_experts": True}, "leave --ep-rebalance-rounds out"),
        ("deep-ep", {"combine": "exact"}, "give --ep-combine partial"),
        ("deep-ep", {"dtype": torch.float16}, "its rows are bfloat16, not float16"),
        ("shared-memory", {"one_host": False}, "the ranks are on several machines"),
    ],
)
def test_a_way_that_does_not_fit_says_why(
    name: str, other: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "found")
    with pytest.raises(ValueError, match=why):
        ways(gpu_site(**other), name)[name]()


@pytest.mark.parametrize(
    ("name", "package"), [("symmetric-memory", "triton"), ("deep-ep", "deep_ep")]
)
def test_a_way_without_its_package_says_which(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"{package} is not installed"):
        ways(gpu_site(), name)[name]()


def test_a_way_that_has_not_run_on_a_gpu_is_used_only_where_it_is_named() -> None:
    assert list(ways(gpu_site())) == ["shared-memory", "gloo"]
    assert list(ways(gpu_site(), "deep-ep")) == ["shared-memory", "gloo", "deep-ep"]


def test_windows_have_room_for_the_rows_of_a_pass_and_tell_the_group_of_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from headrace_kernels.one_sided.dispatch import OneSidedGroup
    from headrace_kernels.one_sided.window import Window
    from headrace_kernels.transport import gpu_ways, symmetric_memory

    def opened(window: Window, group: object, device: torch.device) -> OneSidedGroup:
        assert (group, device.type) == ("all ranks", "cuda")
        buffer = torch.zeros(window.nbytes + 16, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % 16 :][: window.nbytes]
        return OneSidedGroup(window, 0, buffer, [0, 0])

    monkeypatch.setattr(symmetric_memory, "open_windows", opened)
    monkeypatch.setattr(gpu_ways, "torch_group", lambda _: "all ranks")
    missed: list[RankLost] = []
    site = gpu_site(on_lost=missed.append)
    way = ways(site, "symmetric-memory")["symmetric-memory"]()
    assert not way.native
    assert isinstance(way.rounds, gpu_ways.OneSidedRounds)
    group = way.rounds.group
    assert (group.window.most_rows, group.window.combine) == (512, "partial")
    way.rounds.begin(3)
    group.late[1] = True
    with pytest.raises(RankLost, match="rank 1 is lost: its rows or results did not come"):
        group.check()
    assert [one.rank for one in missed] == [1]


class Alone:
    """A transport of one rank, which notes that it is used."""

    rank, ranks = 0, 1

    def __init__(self, name: str, used: list[str]) -> None:
        self._name, self._used = name, used

    def begin(self, round_number: int) -> None:
        """Nothing is left of a round."""

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        self._used.append(self._name)
        [(start, end)] = parcels
        return lambda: Arrived(tuple(column[start:end] for column in columns), [end - start])

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        """Nothing is kept."""


def test_the_ways_take_turns() -> None:
    """So that what keeps the machine for a while keeps all of them, or turns that do not count."""
    used: list[str] = []

    def way(name: str) -> Callable[[], RankWay]:
        transport = Alone(name, used)
        make = partial(AllToAll.of, transport=transport, combine="exact", device=CPU)
        return lambda: RankWay(transport, make)

    offered = {name: way(name) for name in ("shared-memory", "gloo")}
    choose(offered, SHAPE, rank=0, ranks=1, meet=lambda facts: [dict(facts)])
    # The last of a turn is the first of the next one.
    turns = [name for name, _ in itertools.groupby(used)]
    assert turns == ["shared-memory", "gloo"] * 3
    assert used.count("gloo") == used.count("shared-memory") == TURNS * 2 * (6 + 2)


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


def without_memory(place: Place) -> str:
    """No file can be made, as in a full /dev/shm. Nobody waits for the hour in which ranks may meet."""
    memory = Path("/dev/shm/there-is-no-such-folder") / place.name
    offered = ways(replace(site(place), memory=memory, meeting_s=3_600.0))
    chosen = choose(offered, SHAPE, rank=place.rank, ranks=place.ranks, meet=board(place))
    use(place, chosen)
    chosen.close()
    return f"{chosen.names[0]}: {chosen.report['refused']['shared-memory']}"


def test_ranks_do_not_wait_for_memory_that_rank_0_cannot_make(ranks: RankProcesses) -> None:
    for answer in ranks.run(without_memory, 3):
        assert answer.startswith("gloo: rank 0: [Errno 2] No such file or directory")


def test_a_way_that_one_rank_cannot_open_is_left_out_with_the_reason(ranks: RankProcesses) -> None:
    for report in ranks.run(broken_on, 2, 0, False):
        assert report["few_rows"] == "gloo"
        assert report["refused"] == {"shared-memory": "rank 0: no room"}


def test_without_any_way_the_reasons_are_said(ranks: RankProcesses) -> None:
    for answer in ranks.run(broken_on, 2, 0, True):
        assert answer.kind == "ValueError"
        assert "shared-memory: rank 0: no room" in answer.text


def by_size(place: Place) -> list[bool]:
    """Few rows by one way, many by the other, whichever is faster here."""
    opened = [make() for make in ways(site(place)).values()]
    chosen = ChosenWays(("shared-memory", "gloo"), (opened[0], opened[1]), 100, {})
    use(place, chosen)
    chosen.close()
    return [chosen.many]


def test_two_ways_take_turns_by_size(ranks: RankProcesses) -> None:
    assert ranks.run(by_size, 2) == [[True]] * 2

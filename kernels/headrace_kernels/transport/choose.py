"""Which way rows go between the ranks of a group: all ranks time each way at the start, and choose the same one.

A layer's exchange of few rows is timed, as in a decode step, and one of many, as in prefill. The ways take turns: what
else the machine does for a while only adds, so of a rank's turns the best one counts, and of the ranks the slowest.
Between the two sizes the time of a way is taken as `a + b * rows`. Where one way is best for few rows and another one
for many, both are used, by the most rows that any rank has in a round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace_kernels.moe.dispatch import Combine, Dispatch, Routed, Sent
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import RankLost
from headrace_kernels.transport.ways import ExpertsShape, RankWay

log = logging.getLogger(__name__)

FEW_ROWS, MANY_ROWS = 8, 512  # of each rank
TURNS = 5  # of each way
REPEATS = {FEW_ROWS: 6, MANY_ROWS: 2}  # of a turn, the first of which does not count
# A second way for many rows has to take at most so much of the first one's time: cores that others use move single
# times by as much. A guess.
WORTH_A_SECOND = 0.75

MOST_TOLD = 200  # letters; routers refuse more than 256
# What all ranks bring, in their order.
Meet = Callable[[Mapping[str, Any]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What an exchange of a layer takes on the slowest rank: there and back."""

    few_us: float
    many_us: float
    row_bytes: int  # that a rank sends for a row
    worst_us: tuple[float, float] = (0.0, 0.0)  # of few and of many, in the turn that was worst

    @property
    def us_a_row(self) -> float:
        return max(self.many_us - self.few_us, 0.0) / (MANY_ROWS - FEW_ROWS)

    @property
    def fixed_us(self) -> float:
        return max(self.few_us - FEW_ROWS * self.us_a_row, 0.0)

    def us(self, rows: int) -> float:
        return self.fixed_us + rows * self.us_a_row

    def told(self) -> dict[str, Any]:
        gb_per_s = self.row_bytes / self.us_a_row / 1e3 if self.us_a_row else 0.0
        return {
            f"us_of_{FEW_ROWS}_rows": round(self.few_us, 1),
            f"us_of_{MANY_ROWS}_rows": round(self.many_us, 1),
            "us_in_the_worst_turns": [round(us, 1) for us in self.worst_us],
            "fixed_us": round(self.fixed_us, 1),
            "gb_per_s": round(gb_per_s, 3),
        }


@dataclass(slots=True)
class ChosenWays:
    """The ways of a group. `expect` is called on all ranks with the same number before each round."""

    names: tuple[str, str]  # for few rows, and for many
    ways: tuple[RankWay, RankWay]
    many_from: int  # rows
    report: dict[str, Any]  # for a person
    many: bool = False

    def expect(self, most_rows: int) -> None:
        """The most rows that any rank has in the round."""
        self.many = most_rows >= self.many_from

    def begin(self, round_number: int) -> None:
        for way in self._all():
            way.rounds.begin(round_number)

    def abort(self, reason: str) -> None:
        for way in self._all():
            way.rounds.abort(reason)

    def close(self) -> None:
        for way in self._all():
            way.rounds.close()

    def dispatch(self, placement: LayerPlacement) -> Dispatch:
        few, *many = (way.dispatch(placement) for way in self._all())
        return _BySize(self, few, many[0]) if many else few

    @property
    def told(self) -> str:
        """In words, for people who ask a router: the ways that are used, and what those that were timed took."""
        used = " and ".join(dict.fromkeys(self.names))
        measured: dict[str, dict[str, Any]] = self.report["measured"]
        if not measured:
            return used
        few, many = f"us_of_{FEW_ROWS}_rows", f"us_of_{MANY_ROWS}_rows"
        times = [f"{name} {one[few]:.0f} {one[many]:.0f}" for name, one in measured.items()]
        told = f"{used} (us of {FEW_ROWS} and {MANY_ROWS} rows: {', '.join(times)})"
        return told if len(told) <= MOST_TOLD else used

    @property
    def native(self) -> bool:
        """Programs of the CPU exchange rows by themselves, in every round."""
        return len(self._all()) == 1 and self.ways[0].native

    def _all(self) -> list[RankWay]:
        few, many = self.ways
        return [few] if few is many else [few, many]


@dataclass(frozen=True, slots=True)
class _BySize:
    """The `Dispatch` of one layer by two ways."""

    chosen: ChosenWays
    few: Dispatch
    many: Dispatch

    @property
    def combine(self) -> Combine:
        return self.few.combine

    def send(self, routed: Routed) -> Sent:
        return (self.many if self.chosen.many else self.few).send(routed)


def choose(
    ways: Mapping[str, Callable[[], RankWay]],
    shape: ExpertsShape,
    *,
    rank: int,
    ranks: int,
    meet: Meet,
    forced: str | None = None,
) -> ChosenWays:
    """Open the ways and time those that all ranks could open. With one way, or a forced one, nothing is timed.

    Uses round 0 of each way. Raises ValueError where no way can be opened, and RankLost.
    """
    if forced is not None:
        if forced not in ways:
            raise ValueError(f"no transport {forced!r} here; there is {', '.join(ways)}")
        ways = {forced: ways[forced]}
    opened, refused = _open(ways, meet)
    if not opened:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        if forced is not None:
            raise ValueError(f"no rows by --ep-transport {reasons}")
        raise ValueError(f"the ranks have no transport that works on all of them ({reasons})")
    if len(opened) == 1:
        [(name, way)] = opened.items()
        return ChosenWays((name, name), (way, way), 0, _told((name, name), 0, {}, refused))
    mine = _time(opened, shape, rank, ranks)
    costs = slowest(meet({"times": mine}), shape, ranks)
    names, many_from = decide(costs, {name for name, way in opened.items() if way.native})
    for name, way in opened.items():
        if name not in names:
            way.rounds.close()
    few, many = (opened[name] for name in names)
    return ChosenWays(names, (few, many), many_from, _told(names, many_from, costs, refused))


def slowest(facts: list[dict[str, Any]], shape: ExpertsShape, ranks: int) -> dict[str, Cost]:
    """The cost of each way, out of `times` of all ranks, `[way][size][turn]`: alike on each rank."""
    row_bytes = min(shape.top_k, ranks) * shape.hidden * shape.dtype.itemsize

    def cost(name: str) -> Cost:
        few, many = ([fact["times"][name][size] for fact in facts] for size in (0, 1))
        worst = max(map(max, few)), max(map(max, many))
        return Cost(max(map(min, few)), max(map(min, many)), row_bytes, worst)

    return {name: cost(name) for name in facts[0]["times"]}


def decide(costs: Mapping[str, Cost], native: Collection[str] = ()) -> tuple[tuple[str, str], int]:
    """The best way for few rows, the one for many if that is clearly better there, and the rows from which it is.

    With two ways a program has to ask Python in each layer: so a best one that is `native` is the only one.
    """
    few = min(costs, key=lambda name: costs[name].few_us)
    many = min(costs, key=lambda name: costs[name].many_us)
    if few in native or costs[many].many_us > WORTH_A_SECOND * costs[few].many_us:
        many = few
    if few == many:
        return (few, many), 0
    better = (
        rows
        for rows in range(FEW_ROWS + 1, MANY_ROWS)
        if costs[many].us(rows) < costs[few].us(rows)
    )
    return (few, many), next(better, MANY_ROWS)


def _open(
    ways: Mapping[str, Callable[[], RankWay]], meet: Meet
) -> tuple[dict[str, RankWay], dict[str, str]]:
    """Ways that all ranks opened, and why there are no others."""
    all_names = [set(fact["ways"]) for fact in meet({"ways": list(ways)})]
    common = [name for name in ways if all(name in names for names in all_names)]
    refused = {name: "a rank does not have it" for name in ways if name not in common}
    opened: dict[str, RankWay] = {}
    for name in common:
        try:
            mine, reason = ways[name](), None
        except (OSError, RankLost, RuntimeError, ValueError) as error:
            mine, reason = None, str(error) or type(error).__name__
        reasons = [fact["failed"] for fact in meet({"failed": reason})]
        if mine is not None and not any(reasons):
            opened[name] = mine
            continue
        if mine is not None:
            mine.rounds.close()
        refused[name] = next(f"rank {i}: {why}" for i, why in enumerate(reasons) if why)
        log.warning("no rows by %s: %s", name, refused[name])
    return opened, refused


def _time(
    ways: Mapping[str, RankWay], shape: ExpertsShape, rank: int, ranks: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Microseconds of an exchange of few rows and of one of many in each turn of each way."""
    placement = LayerPlacement.even(shape.experts, ranks)
    dispatches: dict[str, Dispatch] = {}
    for name, way in ways.items():
        way.rounds.begin(0)
        dispatches[name] = way.dispatch(placement)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for turn in range(TURNS):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            for rows, found in zip((FEW_ROWS, MANY_ROWS), times[name], strict=True):
                found.append(_time_rows(dispatches[name], shape, rank, rows))
    return times


def _time_rows(dispatch: Dispatch, shape: ExpertsShape, rank: int, rows: int) -> float:
    draw = torch.Generator().manual_seed(rank)
    chosen = torch.rand(rows, shape.experts, generator=draw).topk(shape.top_k).indices
    routed = Routed(
        torch.zeros(rows, shape.hidden, dtype=shape.dtype, device=shape.device),
        chosen.sort(1).values.int().to(shape.device),
        torch.ones(rows, shape.top_k, device=shape.device),
    )
    times: list[float] = []
    for _ in range(REPEATS[rows]):
        began = time.perf_counter()
        sent = dispatch.send(routed)
        slots = sent.receive().slots
        here = slots >= 0 if shape.combine == "exact" else torch.ones_like(slots[:, :1]) > 0
        places = torch.where(here, here.flatten().cumsum(0).view(here.shape) - 1, -1).int()
        results = torch.zeros(int(here.sum()), shape.hidden, dtype=shape.dtype, device=shape.device)
        sent.collect(results, places)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
        times.append(time.perf_counter() - began)
    return min(times[1:]) * 1e6


def _told(
    names: tuple[str, str], many_from: int, costs: Mapping[str, Cost], refused: Mapping[str, str]
) -> dict[str, Any]:
    few, many = names
    report: dict[str, Any] = {"few_rows": few, "many_rows": many}
    if few != many:
        report["many_from_rows"] = many_from
    report["measured"] = {name: cost.told() for name, cost in costs.items()}
    report["refused"] = dict(refused)
    return report

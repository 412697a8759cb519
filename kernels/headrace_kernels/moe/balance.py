"""Placements of experts that even out the load of ranks, for all layers at once.

loads      [layers, experts]       rows of each expert, as routers count them (`counts`)
slots      [layers, ranks, slots]  the expert in each slot
Cost: numpy over layers, one step for each replica and each slot; bench/engine/expert_balance.py has times.
Source: the algorithm of deepseek-ai/EPLB: replicas for the heaviest shares, then the heaviest first to the lightest
rank with room; hierarchical where the groups of experts divide over nodes, so that a row stays within few nodes. Ours:
two replicas of an expert never come to one rank, which they may there; and experts stay where they are as far as loads
allow, so that little has to move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_kernels.moe.placement import LayerPlacement

Loads = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Where experts may go. With `nodes` above 1, whole groups of experts stay on one node."""

    ranks: int
    slots: int  # of each rank
    nodes: int = 1
    expert_groups: int = 1

    def check(self, experts: int) -> None:
        """Raises ValueError where no placement of so many experts is possible."""
        if self.ranks % self.nodes or self.expert_groups % self.nodes:
            raise ValueError(
                f"{self.nodes} nodes must divide {self.ranks} ranks and {self.expert_groups} groups of experts"
            )
        if experts % self.expert_groups:
            raise ValueError(f"{self.expert_groups} groups must divide {experts} experts")
        if not experts <= self.ranks * self.slots:
            raise ValueError(f"{experts} experts in {self.ranks} x {self.slots} slots")
        if self.slots > experts // self.nodes:
            raise ValueError(
                f"{self.slots} slots a rank for {experts // self.nodes} experts: some would be on a rank twice"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Experts stay on their ranks, and groups on their nodes, until those have more than their part of the load."""

    slots: Ids  # [layers, ranks, slots], where they are
    tolerance: float  # so much more, as a part of the mean; below 0: less


def balanced_slots(loads: Loads, shape: GroupShape, stay: Stay | None = None) -> Ids:
    """The expert in each slot of each rank of each layer, by the loads of experts."""
    layers, experts = loads.shape
    shape.check(experts)
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ValueError("loads are counts: finite, and none below 0")
    nodes, groups = shape.nodes, shape.expert_groups
    members = experts // groups
    # Groups to nodes, by the sums of their loads: a node's experts are numbered on their own from here on.
    by_group = loads.reshape(layers, groups, members).sum(-1)
    kinds = np.broadcast_to(np.arange(groups), by_group.shape)
    held = groups_held = None
    if stay is not None:
        held = _holds(stay.slots, experts)  # [layers, ranks, experts]
        groups_held = held.reshape(layers, nodes, -1, groups, members).any(axis=(2, 4))
    tolerance = 0.0 if stay is None else stay.tolerance
    room = _Room(nodes, groups // nodes, tolerance)
    of_node = _pack(by_group, kinds, room, groups_held)  # [layers, nodes, groups of a node]
    numbers = (of_node[..., None] * members + np.arange(members)).reshape(layers * nodes, -1)
    here = np.take_along_axis(np.repeat(loads, nodes, axis=0), numbers, axis=1)
    ranks = shape.ranks // nodes
    kinds, counts = _replicas(here, ranks * shape.slots, ranks)
    share = np.take_along_axis(here / counts, kinds, axis=1)
    if held is not None:
        held = held.reshape(layers * nodes, ranks, experts)
        held = np.take_along_axis(held, numbers[:, None, :], axis=2)
    room = _Room(ranks, shape.slots, tolerance)
    placed = _pack(share, kinds, room, held)  # [layers * nodes, ranks, slots]
    found = np.take_along_axis(numbers, placed.reshape(layers * nodes, -1), axis=1)
    return found.reshape(layers, shape.ranks, shape.slots)


def _holds(slots: Ids, experts: int) -> NDArray[np.bool_]:
    """Whether each rank holds each expert, `[layers, ranks, experts]`."""
    held = np.zeros((*slots.shape[:2], experts), bool)
    np.put_along_axis(held, slots, True, axis=2)
    return held


def layer_placements(slots: Ids, experts: int) -> list[LayerPlacement]:
    """The same, layer by layer, as dispatch takes it."""
    return [LayerPlacement(experts, tuple(map(tuple, ranks))) for ranks in slots.tolist()]


def imbalance(loads: Loads, slots: Ids) -> NDArray[np.float64]:
    """(greatest - mean) / mean of the loads of ranks, by layer. An expert's rows spread evenly over its replicas."""
    layers, experts = loads.shape
    flat = slots.reshape(layers, -1)
    counts = np.zeros((layers, experts))
    np.add.at(counts, (np.arange(layers)[:, None], flat), 1)
    share = loads / np.maximum(counts, 1)
    ranks = np.take_along_axis(share, flat, axis=1).reshape(slots.shape).sum(-1)
    mean = ranks.mean(-1)
    return (ranks.max(-1) - mean) / np.where(mean > 0, mean, 1)


def _replicas(loads: Loads, slots: int, most: int) -> tuple[Ids, Ids]:
    """The expert of each of `slots` replicas, at most `most` of each expert, and how many each has."""
    rows, experts = loads.shape
    counts = np.ones((rows, experts), np.int64)
    row = np.arange(rows)
    for _ in range(slots - experts):
        share = np.where(counts < most, loads / counts, -1.0)
        counts[row, share.argmax(1)] += 1  # the first of equals
    kinds = np.repeat(np.tile(np.arange(experts), rows), counts.ravel())
    return kinds.reshape(rows, slots), counts


@dataclass(frozen=True, slots=True)
class _Room:
    """Packs, the items of each, and how much above the mean a pack may come by what stays in it."""

    packs: int
    items: int
    tolerance: float


def _pack(loads: Loads, kinds: Ids, into: _Room, held: NDArray[np.bool_] | None) -> Ids:
    """Items into packs, no kind twice in one: `[rows, packs, items]` kinds.

    The heaviest first, each to the lightest pack that has room and not its kind; if it can, of those that `held`
    `[rows, packs, kinds]` its kind before. There are as many items as room, and no kind has more of them than there are
    packs.
    """
    packs, room = into.packs, into.items
    rows, items = loads.shape
    assert items == packs * room
    row = np.arange(rows)
    most = loads.sum(1, keepdims=True) / packs * (1 + into.tolerance)
    filled = np.zeros((rows, packs), np.int64)
    total = np.zeros((rows, packs))
    packed = np.zeros((rows, packs, room), np.int64)
    weights = np.zeros((rows, packs, room))
    holds = np.zeros((rows, packs, int(kinds.max()) + 1), bool)
    order = np.argsort(-loads, axis=1, kind="stable")
    for item in order.T:
        kind, load = kinds[row, item], loads[row, item]
        closed = (filled == room) | holds[row, :, kind]
        if held is not None:
            stays = held[row, :, kind] & ~closed & (total + load[:, None] <= most)
            closed |= ~stays & stays.any(1, keepdims=True)
        pack = np.where(closed, np.inf, total).argmin(1)
        for stuck in np.flatnonzero(closed.all(1)):
            pack[stuck] = _make_way(
                int(kind[stuck]),
                filled[stuck],
                total[stuck],
                packed[stuck],
                weights[stuck],
                holds[stuck],
            )
        at = filled[row, pack]
        packed[row, pack, at], weights[row, pack, at] = kind, load
        holds[row, pack, kind] = True
        filled[row, pack] += 1
        total[row, pack] += load
    return packed


def _make_way(
    kind: int,
    filled: Ids,
    total: NDArray[np.float64],
    packed: Ids,
    weights: NDArray[np.float64],
    holds: NDArray[np.bool_],
) -> int:
    """A pack without `kind` that has room now: one of its items went to a pack with room, which all have `kind`.

    There is such an item: a full pack without `kind` has `room` other kinds, a pack that is not full and has `kind` at
    most `room - 2` of these.
    """
    room = packed.shape[1]
    to = int(np.where(filled < room, total, np.inf).argmin())
    movable = ~holds[to][packed] & ~holds[:, kind, None]  # [packs, room]
    after = np.where(movable, total[:, None] - weights, np.inf)
    source, at = np.unravel_index(int(after.argmin()), after.shape)
    moved, load = int(packed[source, at]), float(weights[source, at])
    last = filled[source] - 1
    packed[source, at], weights[source, at] = packed[source, last], weights[source, last]
    filled[source] = last
    total[source] -= load
    holds[source, moved] = False
    packed[to, filled[to]], weights[to, filled[to]] = moved, load
    filled[to] += 1
    total[to] += load
    holds[to, moved] = True
    return int(source)

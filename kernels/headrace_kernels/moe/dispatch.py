"""The seam between the ranks of a group: rows go to the experts that they chose, results come back.

A layer of experts has three stages: *route* and *combine* know the rows of one rank, *compute* the slots of one rank.
A `Dispatch` is what is between them. A row is sent once to each rank that holds some of its experts. Results come back
in one of two ways:

exact    each by itself; they are summed at home in the order of experts. The same bits on any number of ranks.
partial  each rank sums its own, in the order of experts; the sums are summed at home in the order of ranks. Fewer
         bytes; the same bits for one placement and one home rank.

Cost: docs/design/expert_parallelism.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from headrace import _core
from headrace_kernels.moe.placement import Replicas

Combine: TypeAlias = Literal["exact", "partial"]


class Routed(NamedTuple):
    """This rank's rows and where they go."""

    x: torch.Tensor  # [rows, hidden]
    ids: torch.Tensor  # [rows, top_k], int32; experts of the group, ascending
    weights: torch.Tensor  # [rows, top_k], float32


class Received(NamedTuple):
    """Rows that came to this rank's experts, from this rank or others."""

    x: torch.Tensor  # [n, hidden]
    slots: torch.Tensor  # [n, top_k], int32; of this rank, -1 where another one has the expert
    weights: torch.Tensor  # [n, top_k], float32
    scale: torch.Tensor | None = None  # of `x` in e4m3: [n, ceil(hidden / 128)], float32


class Returned(NamedTuple):
    """What came back for this rank's own rows."""

    y: torch.Tensor  # [m, hidden]
    # [rows, answers], int32; the rows of `y` that are summed, in this order, and -1 where a row has fewer
    places: torch.Tensor


class Sent(Protocol):
    """Rows on their way. What is computed before `receive` is computed meanwhile."""

    def receive(self) -> Received:
        """The rows that ask this rank's experts."""
        ...

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        """Send results `y` of the received rows back, and wait for those of this rank's own.

        `places` `[n, answers]` says which rows of `y` are of each received row, -1 where there are fewer: one for each
        of its slots that are here, or (`partial`) one.
        """
        ...


class Dispatch(Protocol):
    """Brings the rows of one layer to the ranks that hold their experts, and the results back."""

    @property
    def combine(self) -> Combine: ...

    def send(self, routed: Routed) -> Sent: ...


@runtime_checkable
class NativeDispatch(Protocol):
    """A `Dispatch` that knows how a recorded program of the CPU does the same by itself."""

    def native(self) -> _core.SharedExchange | None:
        """What the program is given; `None` where it has to call this `Dispatch`."""
        ...


class SingleRank:
    """All experts are here: nothing moves."""

    combine: Combine = "exact"

    def send(self, routed: Routed) -> Here:
        return Here(routed)


@dataclass(frozen=True, slots=True)
class Here:
    """Rows that stay where they are."""

    routed: Routed

    def receive(self) -> Received:
        return Received(*self.routed)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        return Returned(y, places)


class SendPlan(NamedTuple):
    """Which rows go to which rank, and in which order results come back. A *send* is a row on its way to a rank."""

    rows: torch.Tensor  # [sends], int64; rank after rank, rows ascending
    counts: list[int]  # sends to each rank
    slots: torch.Tensor  # [sends, top_k], int32; of that rank, -1 where another one has the expert
    weights: torch.Tensor  # [sends, top_k], float32
    # [rows, answers], int32: where results are among those that come back, rank after rank, in the order of the sends
    places: torch.Tensor
    answers: list[int]  # results that come back from each rank


def plan_sends(
    ids: torch.Tensor, weights: torch.Tensor, replicas: Replicas, ranks: int, combine: Combine
) -> SendPlan:
    """The sends of rows with experts `ids` `[rows, top_k]`, one for each rank that a row goes to."""
    if ids.device.type != "cpu":
        return plan_sends_ref(ids, weights, replicas, ranks, combine)
    rows, counts, slots, sent_weights, places, answers = _core.plan_sends(
        ids.contiguous().numpy(),
        weights.contiguous().numpy(),
        owners=replicas.rank.numpy(),
        slots=replicas.slot.numpy(),
        ranks=ranks,
        partial=combine == "partial",
    )
    tensors = map(torch.from_numpy, (rows, slots, sent_weights, places))
    rows_of, slots_of, weights_of, places_of = tensors
    return SendPlan(rows_of, counts, slots_of, weights_of, places_of, answers)


def plan_sends_ref(
    ids: torch.Tensor, weights: torch.Tensor, replicas: Replicas, ranks: int, combine: Combine
) -> SendPlan:
    """The same by tensor operations, on any device."""
    rows, top_k = ids.shape
    owner, slot = replicas.rank[ids.long()], replicas.slot[ids.long()]
    goes = torch.zeros(rows, ranks, dtype=torch.bool, device=ids.device).scatter_(1, owner, True)
    to, row = goes.T.nonzero(as_tuple=True)
    there = owner[row] == to[:, None]  # [sends, top_k]
    counts = goes.sum(0)
    if combine == "exact":
        answers = torch.zeros_like(counts).index_add_(0, to, there.sum(1))
        send, column = there.nonzero(as_tuple=True)
        places = torch.full((rows, top_k), -1, dtype=torch.int32, device=ids.device)
    else:
        answers = counts
        send = torch.arange(len(row), device=ids.device)
        column = (goes.cumsum(1) - 1)[row, to]  # ranks of a row, ascending
        places = torch.full((rows, min(top_k, ranks)), -1, dtype=torch.int32, device=ids.device)
    places[row[send], column] = torch.arange(len(send), dtype=torch.int32, device=ids.device)
    return SendPlan(
        rows=row,
        counts=counts.tolist(),
        slots=torch.where(there, slot[row], -1),
        weights=weights[row],
        places=places,
        answers=answers.tolist(),
    )


class InOrder(NamedTuple):
    """Results as `SendPlan.places` counts them: received row after received row, in the order of its experts."""

    y: torch.Tensor
    counts: list[int]  # results for each rank


def in_order_of_sends(y: torch.Tensor, places: torch.Tensor, counts: list[int]) -> InOrder:
    """Results `y` at `places` of received rows, `counts` of which came from each rank."""
    if places.device.type == "cpu":
        order, back = _core.order_of_sends(places.contiguous().numpy(), counts)
        return InOrder(y.index_select(0, torch.from_numpy(order)), back)
    there = places >= 0
    back = torch.stack([part.sum() for part in there.split(counts)])
    return InOrder(y[places[there].long()], back.tolist())

"""A `Dispatch` on DeepEP's high-throughput kernels, where that library is installed: NVLink in a node, RDMA between.

It follows the `Buffer` of `deep_ep` as its repository documents it (`get_dispatch_layout`, `dispatch`, `combine`).
DeepEP sends a row once to each rank and adds what ranks return, so this is `partial`: the order of that sum is
DeepEP's. Rows are bfloat16. Its low-latency kernels are not used: they keep rows by expert, which is another seam.

DeepEP numbers experts rank by rank, as many on each; a slot here is an expert there. Not run on a GPU yet: tests have a
stand-in with DeepEP's documented behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from headrace_kernels.moe.dispatch import Combine, Received, Returned, Routed
from headrace_kernels.moe.placement import LayerPlacement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DeepEpBuffer(Protocol):
    """What is used of `deep_ep.Buffer`."""

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> Sequence[Any]:
        """Rows to each rank, to each RDMA rank, to each expert, whether a row goes to a rank, an event."""
        ...

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_rdma_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
    ) -> Sequence[Any]:
        """Rows, experts (of this rank, -1 elsewhere) and weights that came, rows of each expert, a handle, an event."""
        ...

    def combine(self, x: torch.Tensor, handle: Any) -> Sequence[Any]:
        """The sums of what all ranks made of each row, weights, an event."""
        ...


def open_buffer(group: ProcessGroup, hidden: int) -> DeepEpBuffer:
    """DeepEP's memory for rows of so many bfloat16 values; the ranks of the group call this together.

    Raises ValueError where `deep_ep` is not installed.
    """
    try:
        import deep_ep  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            "deep_ep is not installed: see its repository, deepseek-ai/DeepEP"
        ) from error
    kind = cast("Any", deep_ep).Buffer
    ranks, row_bytes = group.size(), 2 * hidden
    configs = [kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)]
    nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
    return kind(group, nvlink, rdma)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepEpDispatch:
    """The `Dispatch` of one layer."""

    buffer: DeepEpBuffer
    experts: int  # as DeepEP counts: slots of all ranks
    number: torch.Tensor  # [experts], int64; of each expert's slot among all, for rows of this rank
    combine: Combine = "partial"

    @classmethod
    def of(
        cls, placement: LayerPlacement, buffer: DeepEpBuffer, rank: int, device: torch.device
    ) -> DeepEpDispatch:
        """Raises ValueError where ranks have different numbers of slots."""
        slots = {len(held) for held in placement.ranks}
        if len(slots) > 1:
            raise ValueError(f"DeepEP has as many experts on each rank, these have {sorted(slots)}")
        (each,) = slots
        home = placement.replicas_for(rank, device)
        number = home.rank * each + home.slot.long()
        return cls(buffer=buffer, experts=each * len(placement.ranks), number=number)

    def send(self, routed: Routed) -> DeepEpSent:
        x, ids, weights = routed
        if x.dtype != torch.bfloat16:
            raise ValueError(f"DeepEP takes rows in bfloat16, not in {x.dtype}")
        numbers = self.number[ids.long()]
        to_rank, to_rdma_rank, to_expert, goes, _ = self.buffer.get_dispatch_layout(
            numbers, self.experts
        )
        came = self.buffer.dispatch(
            x.contiguous(),
            topk_idx=numbers,
            topk_weights=weights,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_rdma_rank,
            is_token_in_rank=goes,
            num_tokens_per_expert=to_expert,
        )
        rows, slots, received_weights, _, handle, _ = came
        received = Received(rows, slots.int().contiguous(), received_weights)
        return DeepEpSent(self.buffer, received, handle)


@dataclass(frozen=True, slots=True)
class DeepEpSent:
    """Rows that DeepEP brought."""

    buffer: DeepEpBuffer
    received: Received
    handle: Any

    def receive(self) -> Received:
        return self.received

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        sums = y[places[:, 0].long()]  # one of each received row
        combined = self.buffer.combine(sums.contiguous(), self.handle)[0]
        rows = torch.arange(len(combined), dtype=torch.int32, device=combined.device)
        return Returned(combined, rows[:, None])

"""A mixture of experts in three stages: route, compute the experts of this rank, combine.

x         [rows, hidden]
residual  [rows, hidden]  what the shared expert gives comes on top of it, then the sum of a row's experts
Source: DeepSeek-V3 2024, section 2.1.2.

What brings rows to the experts of other ranks, and results back, is a `Dispatch` (moe/dispatch.py). The shared expert
is computed while rows are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from headrace_kernels.dense.fp8_linear import Fp8Matrix
from headrace_kernels.dense.fp8_quantise import widened
from headrace_kernels.dense.linear import linear, linear_ref
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_ref
from headrace_kernels.moe.combine import combine, combine_ref
from headrace_kernels.moe.dispatch import Dispatch, Received, Routed
from headrace_kernels.moe.fp8_grouped_linear import (
    Fp8Experts,
    fp8_grouped_linear,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.grouped_linear import grouped_linear, grouped_linear_ref
from headrace_kernels.moe.permute import Permutation, permute, permute_ref
from headrace_kernels.moe.route import route, route_ref

if TYPE_CHECKING:
    from headrace_kernels.ops import GatedMlp, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer's router and those of its experts that this rank holds, each in a slot."""

    gate: torch.Tensor  # [experts of the group, hidden], float32
    bias: torch.Tensor  # [experts of the group], float32
    counts: torch.Tensor  # [experts of the group], int64; rows that chose each expert so far
    gate_up: torch.Tensor | Fp8Experts  # [slots, 2 * width, hidden]; gate rows first
    down: torch.Tensor | Fp8Experts  # [slots, hidden, width]
    routing: Routing
    dispatch: Dispatch
    shared: GatedMlp | None = None  # the expert that all rows go through

    def overwrite(
        self, slot: int, gate_up: torch.Tensor | Fp8Matrix, down: torch.Tensor | Fp8Matrix
    ) -> None:
        """Put another expert into a slot, in the same place in memory, in the order of the device's queue."""
        for held, one in ((self.gate_up, gate_up), (self.down, down)):
            if isinstance(held, Fp8Experts):
                assert isinstance(one, Fp8Matrix), "FP8 experts stay FP8"
                held.overwrite(slot, one)
            else:
                assert isinstance(one, torch.Tensor) and one.shape == held.shape[1:]
                held[slot].copy_(one)

    def slot(self, slot: int) -> list[torch.Tensor]:
        """All that is in a slot, where it is: the weights of both halves, and their scales where they have some."""
        slots = len(self.gate_up)
        if not 0 <= slot < slots:
            raise ValueError(f"slot {slot} of a rank that has {slots}")
        halves = (self.gate_up, self.down)
        return [
            part[slot]
            for half in halves
            for part in ((half.weight, half.scale) if isinstance(half, Fp8Experts) else (half,))
        ]


@dataclass(frozen=True, slots=True)
class MoeKernels:
    """The functions that come in two kinds."""

    linear: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    permute: Callable[..., Permutation]
    grouped_linear: Callable[..., torch.Tensor]
    fp8_grouped_linear: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]


TRITON = MoeKernels(linear, route, permute, grouped_linear, fp8_grouped_linear, silu_mul, combine)
REFERENCE = MoeKernels(
    linear_ref,
    route_ref,
    permute_ref,
    grouped_linear_ref,
    fp8_grouped_linear_ref,
    silu_mul_ref,
    combine_ref,
)


class ExpertResults(NamedTuple):
    """Results of received rows."""

    y: torch.Tensor  # [results, hidden]
    places: (
        torch.Tensor
    )  # [n, answers], int32; which rows of `y` are of each received row, -1 where there are fewer


Shared: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def moe(
    x: torch.Tensor, experts: Experts, residual: torch.Tensor, shared: Shared | None = None
) -> torch.Tensor:
    """`residual` with what the experts of each row make of `x`; `shared` adds the shared one."""
    return _moe(x, experts, residual, shared, TRITON)


def moe_ref(
    x: torch.Tensor, experts: Experts, residual: torch.Tensor, shared: Shared | None = None
) -> torch.Tensor:
    """The same in torch."""
    return _moe(x, experts, residual, shared, REFERENCE)


def _moe(
    x: torch.Tensor,
    experts: Experts,
    residual: torch.Tensor,
    shared: Shared | None,
    kernels: MoeKernels,
) -> torch.Tensor:
    logits = kernels.linear(x.float(), experts.gate)  # [rows, experts of the group]
    ids, weights = kernels.route(logits, experts.bias, experts.routing, experts.counts)
    sent = experts.dispatch.send(Routed(x, ids, weights))
    if shared is not None:
        residual = shared(residual)
    received = sent.receive()
    computed = _compute(received, experts, kernels, x.dtype)
    if experts.dispatch.combine == "partial":
        computed = _summed(computed, received, kernels)
    returned = sent.collect(computed.y, computed.places)
    if experts.dispatch.combine == "partial":
        weights = weights.new_ones(returned.places.shape)  # sums have theirs already
    return kernels.combine(returned.y, returned.places, weights, residual)


def _compute(
    received: Received, experts: Experts, kernels: MoeKernels, dtype: torch.dtype
) -> ExpertResults:
    """What this rank's slots make of the rows that ask them, one by one and without their weights, in `dtype`."""
    permutation = kernels.permute(received.slots, len(experts.gate_up))
    x, scale = received.x, received.scale
    if isinstance(experts.gate_up, Fp8Experts):
        gate_up = kernels.fp8_grouped_linear(
            x, experts.gate_up, permutation, gather=True, scale=scale, out_dtype=dtype
        )
    else:
        wide = x if scale is None else widened(x, scale).to(dtype)
        gate_up = kernels.grouped_linear(wide, experts.gate_up, permutation, gather=True)
    h = kernels.silu_mul(gate_up)
    del gate_up  # the results take its memory
    fp8 = isinstance(experts.down, Fp8Experts)
    grouped = kernels.fp8_grouped_linear if fp8 else kernels.grouped_linear
    y = grouped(h, experts.down, permutation, gather=False)
    return ExpertResults(y, permutation.places)


def _summed(computed: ExpertResults, received: Received, kernels: MoeKernels) -> ExpertResults:
    """One sum of each received row."""
    nothing = torch.zeros_like(received.x, dtype=computed.y.dtype)
    y = kernels.combine(computed.y, computed.places, received.weights, nothing)
    rows = torch.arange(len(y), dtype=torch.int32, device=y.device)
    return ExpertResults(y, rows[:, None])

"""A mixture of experts: route, dispatch, the experts of this rank, collect, combine.

x         [rows, hidden]
residual  [rows, hidden]  with what the shared expert gave; the sum of a row's experts comes on top of it
Source: DeepSeek-V3 2024, section 2.1.2.

The steps between dispatch and collect know only the experts of one rank, those around them only the rows of one rank:
expert parallelism is another `Dispatch`. Results come back one by one and not summed, so that a row's sum is made in
one place in ascending expert id, and has the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from headrace_kernels.dense.linear import linear, linear_ref
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_ref
from headrace_kernels.moe.combine import combine, combine_ref
from headrace_kernels.moe.fp8_grouped_linear import (
    Fp8Experts,
    fp8_grouped_linear,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.grouped_linear import grouped_linear, grouped_linear_ref
from headrace_kernels.moe.permute import Permutation, permute, permute_ref
from headrace_kernels.moe.route import route, route_ref

if TYPE_CHECKING:
    from headrace_kernels.ops import Routing


class Received(NamedTuple):
    """Rows that came to this rank's experts, from this rank or others."""

    x: torch.Tensor  # [n, hidden]
    ids: torch.Tensor  # [n, top_k], int32; expert within the rank's, -1 for those of other ranks


class Returned(NamedTuple):
    """What the experts made of this rank's own rows."""

    y: torch.Tensor  # [m, hidden]
    places: torch.Tensor  # [rows, top_k], int32; which row of `y` each chosen expert's result is


class Dispatch(Protocol):
    """Brings rows to the ranks that hold their experts, and the results back."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> Received:
        """Send rows `[rows, hidden]` to the experts `ids` `[rows, top_k]` of the whole group."""
        ...

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        """Send results `y` `[pairs, hidden]` of the received rows back; `places` `[n, top_k]` says which is which."""
        ...


class SingleRank:
    """All experts are here: nothing moves."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> Received:
        return Received(x, ids)

    def collect(self, y: torch.Tensor, places: torch.Tensor) -> Returned:
        return Returned(y, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer's router and those of its experts that this rank holds."""

    gate: torch.Tensor  # [experts of the group, hidden], float32
    bias: torch.Tensor  # [experts of the group], float32
    gate_up: torch.Tensor | Fp8Experts  # [experts, 2 * width, hidden]; gate rows first
    down: torch.Tensor | Fp8Experts  # [experts, hidden, width]
    routing: Routing
    dispatch: Dispatch


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


def moe(x: torch.Tensor, experts: Experts, residual: torch.Tensor) -> torch.Tensor:
    """`residual` with what the experts of each row make of `x`."""
    return _moe(x, experts, residual, TRITON)


def moe_ref(x: torch.Tensor, experts: Experts, residual: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    return _moe(x, experts, residual, REFERENCE)


def _moe(
    x: torch.Tensor, experts: Experts, residual: torch.Tensor, kernels: MoeKernels
) -> torch.Tensor:
    logits = kernels.linear(x.float(), experts.gate)  # [rows, experts of the group]
    ids, weights = kernels.route(logits, experts.bias, experts.routing)
    received = experts.dispatch.dispatch(x, ids)
    permutation = kernels.permute(received.ids, len(experts.gate_up))

    def product(
        rows: torch.Tensor, weight: torch.Tensor | Fp8Experts, gather: bool
    ) -> torch.Tensor:
        fp8 = isinstance(weight, Fp8Experts)
        grouped = kernels.fp8_grouped_linear if fp8 else kernels.grouped_linear
        return grouped(rows, weight, permutation, gather=gather)

    h = kernels.silu_mul(product(received.x, experts.gate_up, gather=True))
    y = product(h, experts.down, gather=False)  # [pairs, hidden]
    returned = experts.dispatch.collect(y, permutation.places)
    return kernels.combine(returned.y, returned.places, weights, residual)

"""Sum of a row's experts, each by its weight, on top of the residual.

y         [pairs, hidden]  results of the experts, in any order
places    [rows, top_k]    int32; where the results of a row are, in ascending expert id; -1 where there is none
weights   [rows, top_k]    float32
residual  [rows, hidden]   with what the shared expert gave
out       [rows, hidden]   residual + weights[0] * y[places[0]] + ..., one after the other in float32, rounded once
Cost: reads top_k + 1 rows and writes one; memory bandwidth is the bound.
Source: DeepSeek-V3 2024, section 2.1.2. Run on an H100 and an H200.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

TILE = 1024  # values; a guess, not tuned yet


@triton.jit
def _combine_kernel(
    y_ptr, places_ptr, weights_ptr, residual_ptr, out_ptr, hidden,
    TOP_K: tl.constexpr, TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = col < hidden
    acc = tl.load(residual_ptr + row * hidden + col, mask=inside, other=0.0).to(tl.float32)
    for k in range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + k).to(tl.int64)
        weight = tl.load(weights_ptr + row * TOP_K + k)
        there = tl.full((TILE,), place, tl.int64) >= 0  # the interpreter wants masks of one shape
        y = tl.load(y_ptr + place * hidden + col, mask=inside & there, other=0.0)
        acc += weight * y.to(tl.float32)
    tl.store(
        out_ptr + row * hidden + col, narrow(acc, out_ptr.dtype.element_ty, INTERPRET), mask=inside
    )


def combine(
    y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The residual with the experts of each row on top of it."""
    rows, hidden = residual.shape
    assert places.shape == weights.shape and len(places) == rows and y.shape[1] == hidden
    assert y.is_contiguous() and residual.is_contiguous() and weights.is_contiguous()
    assert places.is_contiguous() and weights.dtype == torch.float32
    out = torch.empty_like(residual)
    if rows:
        _combine_kernel[(rows, triton.cdiv(hidden, TILE))](
            y, places, weights, residual, out, hidden, TOP_K=places.shape[1], TILE=TILE, INTERPRET=INTERPRET,
        )  # fmt: skip
    return out


def combine_ref(
    y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The same in torch."""
    out = residual.float()
    for k in range(places.shape[1]):
        place = places[:, k].long()
        term = y[place.clamp(min=0)].float() * weights[:, k, None]
        out = out + term.masked_fill(place[:, None] < 0, 0.0)
    return out.to(residual.dtype)


def combine_bytes(rows: int, top_k: int, hidden: int, element_bytes: int) -> int:
    """Bytes that must move: experts and residual in, the sum out."""
    return rows * (hidden * element_bytes * (top_k + 2) + 8 * top_k)

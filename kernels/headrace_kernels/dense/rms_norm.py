"""RMS norm of rows, with the residual addition before it fused in.

x         [rows, hidden]  what the last layer gave
residual  [rows, hidden]  optional; becomes residual + x, and its norm is taken
weight    [hidden]
out       [rows, hidden]
Cost: reads x (and residual), writes out (and residual), 4 flops a value, so memory bandwidth is the bound.
Source: Zhang and Sennrich 2019; fusing the addition is common practice.

Batch invariance: one program owns one row and sums it in one fixed tree, so other rows cannot change a bit.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # before the multiply: row * hidden passes 2**31
    col = tl.arange(0, TILE)
    inside = col < hidden
    x = tl.load(x_ptr + row * hidden + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * hidden + col, mask=inside, other=0.0).to(tl.float32)
        added = narrow(x, residual_ptr.dtype.element_ty, INTERPRET)
        tl.store(residual_ptr + row * hidden + col, added, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    out = narrow(x * scale * weight, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + row * hidden + col, out, mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Norm of `x`, or of `residual + x`, which then also replaces `residual`. Rows are contiguous."""
    assert x.dim() == 2 and x.is_contiguous() and weight.shape == x.shape[1:]
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = torch.empty_like(x)
    if x.shape[0]:
        _rms_norm_kernel[(x.shape[0],)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.shape[1],
            eps,
            HAS_RESIDUAL=residual is not None,
            TILE=triton.next_power_of_2(x.shape[1]),
            INTERPRET=INTERPRET,
        )
    return out


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in torch."""
    wide = x.float()
    if residual is not None:
        wide = wide + residual.float()
        residual.copy_(wide)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rms_norm_bytes(rows: int, hidden: int, element_bytes: int, *, residual: bool) -> int:
    """Bytes that must move: x in, out out, and the residual both ways; the weight stays in cache."""
    return rows * hidden * element_bytes * (4 if residual else 2)

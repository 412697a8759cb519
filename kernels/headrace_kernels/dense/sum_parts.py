"""The sum of a product's parts, in their order.

parts  [parts, size]  float32
y      [size]
Cost: reads parts, writes y; memory bandwidth, mostly of the L2, is the bound.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

TILE = 256  # elements of a program; not tuned


@triton.jit(do_not_specialize=["size", "count"])
def _sum_parts_kernel(
    parts_ptr, y_ptr, size, count, TILE: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for _ in range(count):
        total += tl.load(parts_ptr + at, mask=at < size, other=0.0)
        parts_ptr += size
    tl.store(y_ptr + at, narrow(total, y_ptr.dtype.element_ty, INTERPRET), mask=at < size)


def sum_parts(parts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Fill `y`, which the caller owns and which has the shape of one part, and return it."""
    assert parts.shape[1:] == y.shape and parts.is_contiguous() and y.is_contiguous()
    _sum_parts_kernel[(triton.cdiv(y.numel(), TILE),)](
        parts, y, y.numel(), len(parts), TILE=TILE, INTERPRET=INTERPRET
    )
    return y


def sum_parts_ref(parts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return y.copy_(total)

"""Matrix product of each head with its own weight, `y[:, h] = x[:, h] @ weight[h]`: what absorbs MLA's projections.

x       [rows, heads, in]   any strides but the last, which is 1
weight  [heads, in, out]    any strides
y       [rows, heads, out]
Cost: 2 * rows * heads * in * out flops; the weight's bytes bound it below about 200 rows on an H200.
Source: the tiled product of Triton's tutorials; the fixed plan is ours. Run on an H100 and an H200.

Batch invariance: tile shapes and the order of `in` are one plan for all row counts.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

# One plan for every row count; guesses, not tuned yet.
ROWS_TILE = 64
OUT_TILE = 64
IN_TILE = 64


@triton.jit(do_not_specialize=["rows"])
def _head_linear_kernel(
    x_ptr, weight_ptr, y_ptr, rows, n_in, n_out,
    x_row, x_head, weight_head, weight_in, weight_out,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(2)
    row = tl.program_id(1).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    wide = tl.float32 if INTERPRET else x_ptr.dtype.element_ty  # of operands
    acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for start in range(0, n_in, IN_TILE):
        k = start + tl.arange(0, IN_TILE)
        x = tl.load(
            x_ptr + row[:, None] * x_row + head * x_head + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < n_in), other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight_ptr + head * weight_head + k[:, None] * weight_in + out[None, :] * weight_out,
            mask=(out[None, :] < n_out) & (k[:, None] < n_in), other=0.0,
        )  # fmt: skip
        acc = tl.dot(x.to(wide), w.to(wide), acc, input_precision="ieee")
    tl.store(
        y_ptr + (row[:, None] * heads + head) * n_out + out[None, :],
        narrow(acc, y_ptr.dtype.element_ty, INTERPRET),
        mask=(row[:, None] < rows) & (out[None, :] < n_out),
    )


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[:, h] @ weight[h]`, summed in float32 and stored as the type of `x`."""
    rows, heads, n_in = x.shape
    n_out = weight.shape[2]
    assert weight.shape[:2] == (heads, n_in) and x.dtype == weight.dtype
    assert n_in == 0 or x.stride(2) == 1
    y = x.new_empty(rows, heads, n_out)
    if rows:
        grid = (triton.cdiv(n_out, OUT_TILE), triton.cdiv(rows, ROWS_TILE), heads)
        _head_linear_kernel[grid](
            x, weight, y, rows, n_in, n_out, x.stride(0), x.stride(1), *weight.stride(),
            ROWS_TILE=ROWS_TILE, OUT_TILE=OUT_TILE, IN_TILE=IN_TILE, INTERPRET=INTERPRET,
        )  # fmt: skip
    return y


def head_linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    return torch.einsum("rhi,hio->rho", x.float(), weight.float()).to(x.dtype)


def head_linear_bytes(rows: int, heads: int, n_in: int, n_out: int, element_bytes: int) -> int:
    """Bytes that must move: each operand once, the result once."""
    return element_bytes * heads * (rows * (n_in + n_out) + n_in * n_out)


def head_linear_flops(rows: int, heads: int, n_in: int, n_out: int) -> int:
    """Multiplications and additions."""
    return 2 * rows * heads * n_in * n_out

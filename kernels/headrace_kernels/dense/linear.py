"""Matrix product with a weight, `y = x @ weight.T`, the same bits whatever the number of rows.

x       [rows, in]
weight  [out, in]
y       [rows, out]
Cost: 2 * rows * in * out flops; weight bytes bound it below about 200 rows on an H200, the tensor cores above.
Source: the tiled product of Triton's tutorials; the fixed plan is ours.

Batch invariance: cuBLAS chooses tile shapes and K splits by the number of rows, so the same row can give other bits in
another batch. Here tile shapes and the order of K are one plan for all row counts.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

# One plan for every row count; guesses that suit Hopper's shared memory, not tuned yet.
ROWS_TILE = 64
OUT_TILE = 64
IN_TILE = 64


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, y_ptr, rows, n_out, n_in,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    out = tl.program_id(0).to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for start in range(0, n_in, IN_TILE):
        k = start + tl.arange(0, IN_TILE)
        x = tl.load(
            x_ptr + row[:, None] * n_in + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < n_in), other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight_ptr + out[None, :] * n_in + k[:, None],
            mask=(out[None, :] < n_out) & (k[:, None] < n_in), other=0.0,
        )  # fmt: skip
        if INTERPRET:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    tl.store(
        y_ptr + row[:, None] * n_out + out[None, :],
        narrow(acc, y_ptr.dtype.element_ty, INTERPRET),
        mask=(row[:, None] < rows) & (out[None, :] < n_out),
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`x @ weight.T`, summed in float32 and stored as `out_dtype` (that of `x` by default)."""
    assert x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype)
    if x.shape[0]:
        grid = (triton.cdiv(weight.shape[0], OUT_TILE), triton.cdiv(x.shape[0], ROWS_TILE))
        _linear_kernel[grid](
            x, weight, y, x.shape[0], weight.shape[0], x.shape[1],
            ROWS_TILE=ROWS_TILE, OUT_TILE=OUT_TILE, IN_TILE=IN_TILE, INTERPRET=INTERPRET,
        )  # fmt: skip
    return y


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same in torch."""
    return (x.float() @ weight.float().T).to(out_dtype or x.dtype)


def linear_bytes(rows: int, n_in: int, n_out: int, element_bytes: int) -> int:
    """Bytes that must move: each operand once, the result once."""
    return element_bytes * (rows * n_in + n_in * n_out + rows * n_out)


def linear_flops(rows: int, n_in: int, n_out: int) -> int:
    """Multiplications and additions."""
    return 2 * rows * n_in * n_out

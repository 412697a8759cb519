"""Matrix product with a weight, `y = x @ weight.T`, the same bits whatever the number of rows.

x       [rows, in]
weight  [out, in]
y       [rows, out]
Cost: 2 * rows * in * out flops; weight bytes bound it below about 200 rows on an H200, the tensor cores above.
Source: the tiled product of Triton's tutorials; the fixed plan is ours.

Batch invariance: cuBLAS chooses tile shapes and K splits by the number of rows, so the same row can give other bits in
another batch. Here tile shapes and the order of sums along K (`parts.py`) are one plan for all row counts.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.dense.parts import parts_of
from headrace_kernels.dense.sum_parts import sum_parts
from headrace_kernels.interpret import INTERPRET, narrow

# One plan for every row count; guesses that suit Hopper's shared memory, not tuned yet.
ROWS_TILE = 64
OUT_TILE = 64
IN_TILE = 64
FP32_TILE = 32  # rows and outputs of float32 products, which have no tensor cores: what a decode step lacks is computed


def tile_of(element_bytes: int) -> tuple[int, int, int]:
    """Rows, outputs and columns."""
    if element_bytes == 4:
        return FP32_TILE, FP32_TILE, IN_TILE
    return ROWS_TILE, OUT_TILE, IN_TILE


@triton.jit(do_not_specialize=["rows", "parts", "part_steps"])
def _linear_kernel(
    x_ptr, weight_ptr, y_ptr, rows, n_out, n_in, parts, part_steps,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    out = tl.program_id(0).to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    first = tl.program_id(2) * parts  # of the parts that this program walks
    total = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for part in range(first, first + parts):
        acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
        for step in range(part_steps):  # past the last column zeros are added
            k = (part * part_steps + step) * IN_TILE + tl.arange(0, IN_TILE)
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
        total += acc
    at = tl.program_id(2) * rows + row  # of sums, one for each part
    tl.store(
        y_ptr + at[:, None] * n_out + out[None, :],
        narrow(total, y_ptr.dtype.element_ty, INTERPRET),
        mask=(row[:, None] < rows) & (out[None, :] < n_out),
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`x @ weight.T`, summed in float32 and stored as `out_dtype` (that of `x` by default)."""
    assert x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    (rows, n_in), n_out = x.shape, weight.shape[0]
    y = x.new_empty(rows, n_out, dtype=out_dtype or x.dtype)
    if not rows:
        return y
    rows_tile, out_tile, in_tile = tile_of(x.element_size())
    row_tiles, out_tiles = triton.cdiv(rows, rows_tile), triton.cdiv(n_out, out_tile)
    parts = parts_of(out_tiles, triton.cdiv(n_in, in_tile))
    split = parts.split(row_tiles, out_tiles)
    sums = y.new_empty(parts.count, rows, n_out, dtype=torch.float32) if split else y
    _linear_kernel[(out_tiles, row_tiles, parts.count if split else 1)](
        x, weight, sums, rows, n_out, n_in, 1 if split else parts.count, parts.steps,
        ROWS_TILE=rows_tile, OUT_TILE=out_tile, IN_TILE=in_tile, INTERPRET=INTERPRET,
    )  # fmt: skip
    return sum_parts(sums, y) if split else y


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

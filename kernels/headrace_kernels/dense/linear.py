"""Matrix product with a weight, `y = x @ weight.T`, the same bits whatever the number of rows.

x       [rows, in]
weight  [out, in]
y       [rows, out]
Cost: 2 * rows * in * out flops; weight bytes bound it below about 200 rows on an H200, the tensor cores above.
Source: the tiled product of Triton's tutorials; the fixed plan is ours.

Batch invariance: cuBLAS chooses tile shapes and K splits by the number of rows, so the same row can give other bits in
another batch. Here the order of sums along K (`parts.py`) is one plan for all row counts, and tiles differ only where
they give the same bits (`tiles.py`).
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.dense.parts import parts_of
from headrace_kernels.dense.sum_parts import sum_parts
from headrace_kernels.dense.tiles import Tile, near_tiles
from headrace_kernels.interpret import INTERPRET, narrow

# By the bytes of an element. Tuned on an H200, but for ENOUGH, which is a guess.
FEW = {2: Tile(64, 64, 64, stages=4), 4: Tile(16, 32, 64, stages=4)}
# For more rows than some: the largest step of a warm-up then compiles what others need.
MANY = {2: Tile(128, 128, 64, warps=8, stages=4), 4: Tile(128, 32, 64, warps=8)}
ENOUGH = 128  # programs of large tiles: with fewer of them multiprocessors would be idle
# Of parts: they have few steps, and more programs share a multiprocessor's memory.
SPLIT = {2: Tile(64, 64, 64), 4: Tile(16, 32, 64)}
# Of float32: three products of TF32 on tensor cores. As exact as multiplying in float32, and several times faster.
PRECISION = "tf32x3"


def tile_of(element_bytes: int) -> Tile:
    """The tile of few rows, by which columns are cut into parts."""
    return FEW[element_bytes]


@triton.jit(do_not_specialize=["rows", "parts", "part_steps"])
def _linear_kernel(
    x_ptr, weight_ptr, y_ptr, rows, n_out, n_in, parts, part_steps,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    row_tile, out_tile = near_tiles(tl.program_id(0), rows, n_out, ROWS_TILE, OUT_TILE)
    row = row_tile.to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    out = out_tile.to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    first = tl.program_id(1) * parts  # of the parts that this program walks
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
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        total += acc
    at = tl.program_id(1) * rows + row  # of sums, one for each part
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
    tile, many = tile_of(x.element_size()), MANY[x.element_size()]
    parts = parts_of(triton.cdiv(n_out, tile.outs), triton.cdiv(n_in, tile.columns))
    split = parts.split(_tiles(tile, rows, n_out))
    sums = y.new_empty(parts.count, rows, n_out, dtype=torch.float32) if split else y
    if not split and (
        parts.count > 1 or (rows >= many.rows and _tiles(many, rows, n_out) >= ENOUGH)
    ):
        tile = many
    elif split:
        tile = SPLIT[x.element_size()]
    _linear_kernel[(_tiles(tile, rows, n_out), parts.count if split else 1)](
        x, weight, sums, rows, n_out, n_in, 1 if split else parts.count, parts.steps,
        ROWS_TILE=tile.rows, OUT_TILE=tile.outs, IN_TILE=tile.columns, PRECISION=PRECISION, INTERPRET=INTERPRET,
        **tile.options,
    )  # fmt: skip
    return sum_parts(sums, y) if split else y


def _tiles(tile: Tile, rows: int, n_out: int) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(n_out, tile.outs)


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

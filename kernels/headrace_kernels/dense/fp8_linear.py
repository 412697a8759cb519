"""Matrix product with a block-scaled e4m3 weight, `y = x @ weight.T`, activations quantised on the way.

x        [rows, in]                   float; quantised per row and 128 columns (fp8_quantise.py)
weight   [out, in]                    e4m3
scale    [blocks of out, ceil(in / 128)]  float32; weight = e4m3 * scale of its block, the last block may be partial
row_block  [out]                      int32; the row of `scale` that an output has
y        [rows, out]
Cost: 2 * rows * in * out flops; weight bytes bound it below about 350 rows on an H200, the tensor cores above.
Source: DeepSeek-V3 2024, section 3.3 (fine-grained quantisation, sums promoted to float32 every 128 columns). Run on an
H100; e4m3 products need compute capability 8.9 at least.

`row_block` is `output // 128` in a matrix as stored. Stacked matrices keep their own blocks through it, whatever their
heights are.
Batch invariance: tile shapes and the order of sums along the columns (`parts.py`, in steps of 128) are one plan for
all row counts, and scales are a row's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_kernels.dense.fp8_quantise import BLOCK, quantise_rows, quantise_rows_ref, widened
from headrace_kernels.dense.parts import parts_of
from headrace_kernels.dense.sum_parts import sum_parts
from headrace_kernels.dense.tiles import Tile
from headrace_kernels.interpret import INTERPRET, narrow, widen

# One plan for every row count; larger tiles were no faster on an H200. A step along the columns is one block of scales.
TILE = Tile(64, 64, BLOCK)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A block-scaled weight."""

    weight: torch.Tensor
    scale: torch.Tensor
    row_block: torch.Tensor

    def dequantised(self) -> torch.Tensor:
        """The weight in float32."""
        scale = self.scale[self.row_block.long()].repeat_interleave(BLOCK, dim=1)
        return self.weight.float() * scale[:, : self.weight.shape[1]]


def fp8_matrix(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Fp8Matrix:
    """Matrices `[out_i, in]` with their scales `[ceil(out_i / 128), ceil(in / 128)]` as one, stacked."""
    blocks: list[torch.Tensor] = []
    first_block = 0
    for weight, scale in parts:
        out_blocks, in_blocks = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
        assert weight.dtype == torch.float8_e4m3fn and scale.shape == (out_blocks, in_blocks)
        blocks.append(torch.arange(len(weight), dtype=torch.int32) // BLOCK + first_block)
        first_block += out_blocks
    return Fp8Matrix(
        torch.cat([weight.view(torch.uint8) for weight, _ in parts]).view(torch.float8_e4m3fn),
        torch.cat([scale.float() for _, scale in parts]),
        torch.cat(blocks).to(parts[0][0].device),
    )


@triton.jit(do_not_specialize=["rows", "parts", "part_steps"])
def _fp8_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_block_ptr, y_ptr, rows, n_out, n_in, in_blocks, parts, part_steps,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    out = tl.program_id(0).to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    scale_at = tl.load(row_block_ptr + out, mask=out < n_out, other=0) * in_blocks
    wide = tl.float32 if INTERPRET else weight_ptr.dtype.element_ty  # of operands
    first = tl.program_id(2) * parts  # of the parts that this program walks
    total = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for part in range(first, first + parts):
        acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
        for step in range(part_steps):  # past the last column zeros are added
            block = part * part_steps + step
            k = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(
                x_ptr + row[:, None] * n_in + k[None, :],
                mask=(row[:, None] < rows) & (k[None, :] < n_in), other=0.0,
            )  # fmt: skip
            w = tl.load(
                weight_ptr + out[None, :] * n_in + k[:, None],
                mask=(out[None, :] < n_out) & (k[:, None] < n_in), other=0.0,
            )  # fmt: skip
            scaled_by = tl.minimum(block, in_blocks - 1)
            x_scale = tl.load(x_scale_ptr + row * in_blocks + scaled_by, mask=row < rows, other=0.0)
            w_scale = tl.load(scale_ptr + scale_at + scaled_by, mask=out < n_out, other=0.0)
            x, w = widen(x, wide, INTERPRET), widen(w, wide, INTERPRET)
            product = tl.dot(x, w, input_precision="ieee")
            acc += product * (x_scale[:, None] * w_scale[None, :])
        total += acc
    at = tl.program_id(2) * rows + row  # of sums, one for each part
    tl.store(
        y_ptr + at[:, None] * n_out + out[None, :],
        narrow(total, y_ptr.dtype.element_ty, INTERPRET),
        mask=(row[:, None] < rows) & (out[None, :] < n_out),
    )


def fp8_linear(
    x: torch.Tensor, weight: Fp8Matrix, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`x @ weight.T` of quantised rows, stored as `out_dtype` (that of `x` by default)."""
    n_out, n_in = weight.weight.shape
    assert x.dim() == 2 and x.shape[1] == n_in and weight.row_block.shape == (n_out,)
    assert weight.weight.is_contiguous() and weight.scale.is_contiguous()
    values, scale = quantise_rows(x)
    rows, in_blocks = scale.shape
    y = x.new_empty(rows, n_out, dtype=out_dtype or x.dtype)
    if not rows:
        return y
    row_tiles, out_tiles = triton.cdiv(rows, TILE.rows), triton.cdiv(n_out, TILE.outs)
    parts = parts_of(out_tiles, in_blocks)
    split = parts.split(row_tiles * out_tiles)
    sums = y.new_empty(parts.count, rows, n_out, dtype=torch.float32) if split else y
    _fp8_linear_kernel[(out_tiles, row_tiles, parts.count if split else 1)](
        values, scale, weight.weight, weight.scale, weight.row_block, sums, rows, n_out, n_in, in_blocks,
        1 if split else parts.count, parts.steps,
        ROWS_TILE=TILE.rows, OUT_TILE=TILE.outs, BLOCK=BLOCK, INTERPRET=INTERPRET,
    )  # fmt: skip
    return sum_parts(sums, y) if split else y


def fp8_linear_ref(
    x: torch.Tensor, weight: Fp8Matrix, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same in torch: both sides dequantised."""
    wide = widened(*quantise_rows_ref(x))
    return (wide @ weight.dequantised().T).to(out_dtype or x.dtype)


def fp8_linear_bytes(rows: int, n_in: int, n_out: int, element_bytes: int) -> int:
    """Bytes that must move in the product: e4m3 operands and their scales in, the result out."""
    blocks = -(-n_in // BLOCK)
    scales = 4 * blocks * (rows + -(-n_out // BLOCK)) + 4 * n_out
    return rows * n_in + n_in * n_out + scales + element_bytes * rows * n_out


def fp8_linear_flops(rows: int, n_in: int, n_out: int) -> int:
    """Multiplications and additions."""
    return 2 * rows * n_in * n_out

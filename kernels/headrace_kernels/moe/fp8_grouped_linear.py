"""Matrix products of rows with the block-scaled e4m3 weights of their experts.

x       [rows, in] where `gather`, else [pairs, in] in the order of their experts; quantised on the way
weight  [experts, out, in]               e4m3
scale   [experts, blocks of out, ceil(in / 128)]  float32
row_block  [out]                         int32; the row of `scale` that an output has, the same in every expert
y       [pairs, out]  in the order of their experts (moe_permute.py); what is past the last expert's means nothing
Cost: 2 * pairs * in * out flops; the weights of all experts that have rows bound it below some hundred rows each.
Source: as fp8_linear.py and moe_grouped_linear.py, batch invariance too. Run on an H200; e4m3 products need
compute capability 8.9 at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_kernels.dense.fp8_linear import Fp8Matrix
from headrace_kernels.dense.fp8_quantise import (
    BLOCK,
    quantise_rows,
    quantise_rows_ref,
    widened,
)
from headrace_kernels.dense.tiles import Tile
from headrace_kernels.interpret import INTERPRET, narrow, widen
from headrace_kernels.moe.grouped_linear import by_expert, most_tiles, tile_of_program
from headrace_kernels.moe.permute import Permutation
from headrace_kernels.warming import forms_to_launch

# Both give the same bits (dense/tiles.py). A step along the columns is one block of scales. Tuned on an H200.
FEW = Tile(64, 64, BLOCK, stages=4)
MANY = Tile(64, 128, BLOCK)  # where experts have as many rows each


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """The block-scaled weights of experts, all alike in shape."""

    weight: torch.Tensor
    scale: torch.Tensor
    row_block: torch.Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, expert: int) -> Fp8Matrix:
        return Fp8Matrix(self.weight[expert], self.scale[expert], self.row_block)

    def overwrite(self, slot: int, matrix: Fp8Matrix) -> None:
        """Put the weights of another expert there, in the same place in memory."""
        assert matrix.weight.shape == self.weight.shape[1:]
        assert matrix.scale.shape == self.scale.shape[1:]
        self.weight[slot].view(torch.uint8).copy_(matrix.weight.view(torch.uint8))
        self.scale[slot].copy_(matrix.scale)


def fp8_experts(matrices: Sequence[Fp8Matrix]) -> Fp8Experts:
    """The matrices of all experts as one, stacked. Each is asked for once, and let go of before the next."""
    count, first = len(matrices), matrices[0]
    weights = first.weight.new_empty(count, *first.weight.shape, dtype=torch.uint8)
    scales = first.scale.new_empty(count, *first.scale.shape)

    def put(expert: int, matrix: Fp8Matrix) -> None:
        weights[expert] = matrix.weight.view(torch.uint8)
        scales[expert] = matrix.scale

    put(0, first)
    row_block = first.row_block
    del first
    for expert in range(1, count):
        put(expert, matrices[expert])
    return Fp8Experts(weights.view(torch.float8_e4m3fn), scales, row_block)


@triton.jit
def _fp8_grouped_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_block_ptr, y_ptr, pairs_ptr, offsets_ptr,
    n_out, n_in, in_blocks, out_blocks, top_k,
    EXPERTS: tl.constexpr, EXPERT_TILE: tl.constexpr, GATHER: tl.constexpr,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    expert, first, end = tile_of_program(
        tl.program_id(1), offsets_ptr, EXPERTS, EXPERT_TILE, ROWS_TILE
    )
    if expert == EXPERTS:
        return
    place = first + tl.arange(0, ROWS_TILE)
    valid = place < end
    if GATHER:
        row = (tl.load(pairs_ptr + place, mask=valid, other=0) // top_k).to(tl.int64)
    else:
        row = place.to(tl.int64)
    out = tl.program_id(0).to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    weight_at = (expert.to(tl.int64) * n_out + out) * n_in
    block_row = tl.load(row_block_ptr + out, mask=out < n_out, other=0)
    scale_at = (expert.to(tl.int64) * out_blocks + block_row) * in_blocks
    wide = tl.float32 if INTERPRET else weight_ptr.dtype.element_ty  # of operands
    acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for block in range(in_blocks):
        k = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + row[:, None] * n_in + k[None, :],
            mask=valid[:, None] & (k[None, :] < n_in), other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight_ptr + weight_at[None, :] + k[:, None],
            mask=(out[None, :] < n_out) & (k[:, None] < n_in), other=0.0,
        )  # fmt: skip
        x_scale = tl.load(x_scale_ptr + row * in_blocks + block, mask=valid, other=0.0)
        w_scale = tl.load(scale_ptr + scale_at + block, mask=out < n_out, other=0.0)
        x, w = widen(x, wide, INTERPRET), widen(w, wide, INTERPRET)
        product = tl.dot(x, w, input_precision="ieee")
        acc += product * (x_scale[:, None] * w_scale[None, :])
    tl.store(
        y_ptr + place.to(tl.int64)[:, None] * n_out + out[None, :],
        narrow(acc, y_ptr.dtype.element_ty, INTERPRET),
        mask=valid[:, None] & (out[None, :] < n_out),
    )


def fp8_grouped_linear(
    x: torch.Tensor,
    weight: Fp8Experts,
    permutation: Permutation,
    *,
    gather: bool,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of the quantised pairs, stored as `out_dtype`, that of `x` by default. With `scale` `x` is quantised."""
    experts, n_out, n_in = weight.weight.shape
    pairs = permutation.pairs.numel()
    assert x.shape[1] == n_in and (gather or len(x) == pairs) and len(weight.scale) == experts
    assert weight.weight.is_contiguous() and weight.scale.is_contiguous()
    # Once for each row, however many experts it goes to.
    values, scale = quantise_rows(x) if scale is None else (x, scale)
    assert values.dtype == weight.weight.dtype and scale.shape == (len(x), triton.cdiv(n_in, BLOCK))
    y = x.new_empty(pairs, n_out, dtype=out_dtype or x.dtype)
    if pairs:
        chosen = MANY if pairs >= MANY.rows * experts else FEW
        for tile in forms_to_launch(chosen, (FEW, MANY)):
            options = tile.options
            grid = (triton.cdiv(n_out, tile.outs), most_tiles(pairs, experts, tile.rows))
            _fp8_grouped_linear_kernel[grid](
                values, scale, weight.weight, weight.scale, weight.row_block, y, permutation.pairs, permutation.offsets,
                n_out, n_in, scale.shape[1], weight.scale.shape[1], permutation.places.shape[1],
                EXPERTS=experts, EXPERT_TILE=triton.next_power_of_2(experts), GATHER=gather,
                ROWS_TILE=tile.rows, OUT_TILE=tile.outs, BLOCK=BLOCK, INTERPRET=INTERPRET,
                **options,
            )  # fmt: skip
    return y


def fp8_grouped_linear_ref(
    x: torch.Tensor,
    weight: Fp8Experts,
    permutation: Permutation,
    *,
    gather: bool,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in torch, one expert after the other."""
    out_dtype = out_dtype or x.dtype
    values, scale = quantise_rows_ref(x) if scale is None else (x, scale)
    products = by_expert(
        widened(values, scale),
        lambda expert, rows: rows @ weight[expert].dequantised().T,
        weight.weight.shape[:2],
        permutation,
        gather=gather,
    )
    return products.to(out_dtype)


def fp8_grouped_linear_bytes(
    pairs: int, busy_experts: int, n_in: int, n_out: int, element_bytes: int
) -> int:
    """Bytes that must move in the product: e4m3 operands and their scales in, each pair's result out."""
    blocks = -(-n_in // BLOCK)
    weights = busy_experts * (n_in * n_out + 4 * blocks * -(-n_out // BLOCK))
    return weights + pairs * (n_in + 4 * blocks + element_bytes * n_out)


def fp8_grouped_linear_flops(pairs: int, n_in: int, n_out: int) -> int:
    """Multiplications and additions."""
    return 2 * pairs * n_in * n_out

"""Matrix products of rows with the weights of their experts, `y = x @ weight[expert].T`.

x       [rows, in] where `gather`, else [pairs, in] in the order of their experts
weight  [experts, out, in]
y       [pairs, out]  in the order of their experts (moe_permute.py); what is past the last expert's means nothing
Cost: 2 * pairs * in * out flops; the weights of all experts that have rows bound it below some hundred rows each.
Source: grouped products as in MegaBlocks (Gale et al. 2023). Run on an H100 and an H200.

How many rows an expert has is known to the device alone. As many programs start as tiles can be at most, and each finds
its expert from `offsets`; those that are too many return at once.
Batch invariance: tile shapes and the order of `in` are one plan, whatever the number of rows of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from headrace_kernels.dense.linear import linear_ref
from headrace_kernels.dense.tiles import Tile
from headrace_kernels.interpret import INTERPRET, narrow
from headrace_kernels.moe.permute import Permutation
from headrace_kernels.warming import forms_to_launch

# Both give the same bits (dense/tiles.py). Tuned on an H200.
FEW = Tile(64, 64, 64, stages=4)
MANY = Tile(128, 256, 64, warps=8)  # where experts have as many rows each


@triton.jit
def tile_of_program(
    program, offsets_ptr, EXPERTS: tl.constexpr, EXPERT_TILE: tl.constexpr, ROWS_TILE: tl.constexpr
) -> tuple[Any, Any, Any]:
    """Expert (`EXPERTS` where there is none), first place and end of its places, of the tile with this number."""
    e = tl.arange(0, EXPERT_TILE)
    starts = tl.load(offsets_ptr + e, mask=e < EXPERTS, other=0)
    ends = tl.load(offsets_ptr + e + 1, mask=e < EXPERTS, other=0)
    tiles = (ends - starts + ROWS_TILE - 1) // ROWS_TILE
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((upto <= program) & (e < EXPERTS)).to(tl.int32), axis=0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    start = tl.sum(tl.where(e == expert, starts, 0), axis=0)
    end = tl.sum(tl.where(e == expert, ends, 0), axis=0)
    return expert, start + (program - first_tile) * ROWS_TILE, end


@triton.jit
def _grouped_linear_kernel(
    x_ptr, weight_ptr, y_ptr, pairs_ptr, offsets_ptr, n_out, n_in, top_k,
    EXPERTS: tl.constexpr, EXPERT_TILE: tl.constexpr, GATHER: tl.constexpr,
    ROWS_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, INTERPRET: tl.constexpr,
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
    wide = tl.float32 if INTERPRET else x_ptr.dtype.element_ty  # of operands
    acc = tl.zeros((ROWS_TILE, OUT_TILE), dtype=tl.float32)
    for start in range(0, n_in, IN_TILE):
        k = start + tl.arange(0, IN_TILE)
        x = tl.load(
            x_ptr + row[:, None] * n_in + k[None, :],
            mask=valid[:, None] & (k[None, :] < n_in), other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight_ptr + weight_at[None, :] + k[:, None],
            mask=(out[None, :] < n_out) & (k[:, None] < n_in), other=0.0,
        )  # fmt: skip
        acc = tl.dot(x.to(wide), w.to(wide), acc, input_precision="ieee")
    tl.store(
        y_ptr + place.to(tl.int64)[:, None] * n_out + out[None, :],
        narrow(acc, y_ptr.dtype.element_ty, INTERPRET),
        mask=valid[:, None] & (out[None, :] < n_out),
    )


def most_tiles(pairs: int, experts: int, rows_tile: int) -> int:
    """How many tiles of rows there are at most: each expert's last one may be partial."""
    return min(pairs, pairs // rows_tile + experts)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, permutation: Permutation, *, gather: bool
) -> torch.Tensor:
    """Products of the pairs, summed in float32 and stored as the type of `x`."""
    experts, n_out, n_in = weight.shape
    pairs = permutation.pairs.numel()
    assert x.shape[1] == n_in and x.dtype == weight.dtype and (gather or len(x) == pairs)
    assert x.is_contiguous() and weight.is_contiguous()
    y = x.new_empty(pairs, n_out)
    if pairs:
        chosen = MANY if pairs >= MANY.rows * experts else FEW
        for tile in forms_to_launch(chosen, (FEW, MANY)):
            options = tile.options
            grid = (triton.cdiv(n_out, tile.outs), most_tiles(pairs, experts, tile.rows))
            _grouped_linear_kernel[grid](
                x, weight, y, permutation.pairs, permutation.offsets, n_out, n_in, permutation.places.shape[1],
                EXPERTS=experts, EXPERT_TILE=triton.next_power_of_2(experts), GATHER=gather,
                ROWS_TILE=tile.rows, OUT_TILE=tile.outs, IN_TILE=tile.columns, INTERPRET=INTERPRET,
                **options,
            )  # fmt: skip
    return y


def grouped_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, permutation: Permutation, *, gather: bool
) -> torch.Tensor:
    """The same in torch, one expert after the other."""
    return by_expert(
        x,
        lambda expert, rows: linear_ref(rows, weight[expert]),
        weight.shape[:2],
        permutation,
        gather=gather,
    )


def by_expert(
    x: torch.Tensor,
    product: Callable[[int, torch.Tensor], torch.Tensor],
    shape: Sequence[int],
    permutation: Permutation,
    *,
    gather: bool,
) -> torch.Tensor:
    """`product(expert, rows)` of every expert that has rows; `shape` is (experts, out)."""
    experts, n_out = shape
    offsets, top_k = permutation.offsets.tolist(), permutation.places.shape[1]
    y = x.new_zeros(len(permutation.pairs), n_out)
    for expert in range(experts):
        start, end = offsets[expert], offsets[expert + 1]
        if start == end:
            continue
        rows = x[permutation.pairs[start:end].long() // top_k] if gather else x[start:end]
        y[start:end] = product(expert, rows)
    return y


def grouped_linear_bytes(
    pairs: int, busy_experts: int, n_in: int, n_out: int, element_bytes: int
) -> int:
    """Bytes that must move: the weights of experts that have rows once, each pair in and out."""
    return element_bytes * (busy_experts * n_in * n_out + pairs * (n_in + n_out))


def grouped_linear_flops(pairs: int, n_in: int, n_out: int) -> int:
    """Multiplications and additions."""
    return 2 * pairs * n_in * n_out

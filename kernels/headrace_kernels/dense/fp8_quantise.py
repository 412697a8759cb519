"""Rows as e4m3 with one float32 scale for each 128 of their values.

x       [rows, width]  float
values  [rows, width]  e4m3
scale   [rows, ceil(width / 128)]  float32; x is about values * scale
Cost: reads x, writes values and scales; memory bandwidth is the bound.
Source: DeepSeek-V3 2024, section 3.3. Its bits on an H100 are those of torch.

The scales are a row's own, so they do not depend on the rows beside it. Where a block has a NaN or an infinity, its
scale and all of its values are NaN.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow

BLOCK = 128  # values of one scale, and rows and columns of one scale of a weight; part of the checkpoint format
BLOCKS_TILE = 8  # blocks of one program; a guess, not tuned yet
E4M3_MAX = 448.0


@triton.jit
def _quantise_rows_kernel(
    x_ptr, values_ptr, scale_ptr, width, blocks, x_row,
    BLOCK: tl.constexpr, BLOCKS_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS_TILE + tl.arange(0, BLOCKS_TILE)
    col = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * x_row + col, mask=col < width, other=0.0).to(tl.float32)
    # Bits without their sign are ordered as the magnitudes are, and NaN is above infinity.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.cast(tl.max(bits, axis=1), tl.float32, bitcast=True)
    peak = tl.where(peak < float("inf"), peak, float("nan"))
    scale = tl.div_rn(peak, tl.full((BLOCKS_TILE,), 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)  # of zeros
    values = tl.div_rn(x, tl.broadcast_to(scale[:, None], (BLOCKS_TILE, BLOCK)))
    tl.store(
        values_ptr + row * width + col,
        narrow(values, values_ptr.dtype.element_ty, INTERPRET),
        mask=col < width,
    )
    tl.store(scale_ptr + row * blocks + block, scale, mask=block < blocks)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of `x`, whose last dimension is contiguous."""
    rows, width = x.shape
    blocks = triton.cdiv(width, BLOCK)
    assert x.stride(1) == 1 or width == 1
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if rows:
        _quantise_rows_kernel[(rows, triton.cdiv(blocks, BLOCKS_TILE))](
            x, values, scale, width, blocks, x.stride(0),
            BLOCK=BLOCK, BLOCKS_TILE=BLOCKS_TILE, INTERPRET=INTERPRET,
        )  # fmt: skip
    return values, scale


def quantise_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    rows, width = x.shape
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - width)).view(
        rows, blocks, BLOCK
    )
    peak = padded.abs().amax(-1)
    # A tensor, as on a GPU torch divides by a number by multiplying with its inverse.
    scale = peak.where(peak.isfinite(), torch.nan) / torch.full_like(peak, E4M3_MAX)
    scale = torch.where(scale == 0, 1.0, scale)  # of zeros
    values = (padded / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(1)[:, :width].to(torch.float8_e4m3fn).contiguous(), scale


def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The rows that values and scales stand for, in float32."""
    return values.float() * scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]


def quantise_rows_bytes(rows: int, width: int, element_bytes: int) -> int:
    """Bytes that must move: x in, values and scales out."""
    return rows * (width * (element_bytes + 1) + 4 * -(-width // BLOCK))

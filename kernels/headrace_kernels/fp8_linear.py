"""Matrix product with a block-scaled e4m3 weight, `y = x @ weight.T`, activations quantised on the way.

x        [rows, in]                   float; quantised per row and 128 columns (fp8_quantise.py)
weight   [out, in]                    e4m3
scale    [blocks of out, ceil(in / 128)]  float32; weight = e4m3 * scale of its block, the last block may be partial
row_block  [out]                      int32; the row of `scale` that an output has
y        [rows, out]
Source: DeepSeek-V3 2024, section 3.3 (fine-grained quantisation, sums promoted to float32 every 128 columns).

`row_block` is `output // 128` in a matrix as stored. Stacked matrices keep their own blocks through it, whatever their
heights are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_kernels.fp8_quantise import BLOCK, quantise_rows_ref


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


def fp8_linear_ref(
    x: torch.Tensor, weight: Fp8Matrix, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same in torch: both sides dequantised."""
    values, scale = quantise_rows_ref(x)
    wide = values.float() * scale.repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]
    return (wide @ weight.dequantised().T).to(out_dtype or x.dtype)

"""Matrix products of rows with the block-scaled e4m3 weights of their experts.

x       [rows, in] where `gather`, else [pairs, in] in the order of their experts; quantised on the way
weight  [experts, out, in]               e4m3
scale   [experts, blocks of out, ceil(in / 128)]  float32
row_block  [out]                         int32; the row of `scale` that an output has, the same in every expert
y       [pairs, out]  in the order of their experts (moe_permute.py); what is past the last expert's means nothing
Source: as fp8_linear.py and moe_grouped_linear.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_kernels.fp8_linear import Fp8Matrix, fp8_linear_ref
from headrace_kernels.moe_permute import Permutation


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


def fp8_experts(matrices: Sequence[Fp8Matrix]) -> Fp8Experts:
    """The matrices of all experts as one, stacked."""
    weights = torch.stack([matrix.weight.view(torch.uint8) for matrix in matrices])
    return Fp8Experts(
        weights.view(torch.float8_e4m3fn),
        torch.stack([matrix.scale for matrix in matrices]),
        matrices[0].row_block,
    )


def fp8_grouped_linear_ref(
    x: torch.Tensor, weight: Fp8Experts, permutation: Permutation, *, gather: bool
) -> torch.Tensor:
    """The same in torch, one expert after the other."""
    offsets, top_k = permutation.offsets.tolist(), permutation.places.shape[1]
    y = x.new_zeros(len(permutation.pairs), weight.weight.shape[1])
    for expert in range(len(weight)):
        start, end = offsets[expert], offsets[expert + 1]
        if start == end:
            continue
        rows = x[permutation.pairs[start:end].long() // top_k] if gather else x[start:end]
        y[start:end] = fp8_linear_ref(rows, weight[expert])
    return y

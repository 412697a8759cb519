"""Matrix products of rows with the weights of their experts, `y = x @ weight[expert].T`.

x       [rows, in] where `gather`, else [pairs, in] in the order of their experts
weight  [experts, out, in]
y       [pairs, out]  in the order of their experts (moe_permute.py); what is past the last expert's means nothing
"""

import torch

from headrace_kernels.linear import linear_ref
from headrace_kernels.moe_permute import Permutation


def grouped_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, permutation: Permutation, *, gather: bool
) -> torch.Tensor:
    """The same in torch, one expert after the other."""
    offsets, top_k = permutation.offsets.tolist(), permutation.places.shape[1]
    y = x.new_zeros(len(permutation.pairs), weight.shape[1])
    for expert in range(len(weight)):
        start, end = offsets[expert], offsets[expert + 1]
        if start == end:
            continue
        rows = x[permutation.pairs[start:end].long() // top_k] if gather else x[start:end]
        y[start:end] = linear_ref(rows, weight[expert])
    return y

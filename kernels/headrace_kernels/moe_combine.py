"""Sum of a row's experts, each by its weight, on top of the residual.

y         [pairs, hidden]  results of the experts, in any order
places    [rows, top_k]    int32; where the results of a row are, in ascending expert id; -1 where there is none
weights   [rows, top_k]    float32
residual  [rows, hidden]   with what the shared expert gave
out       [rows, hidden]   residual + weights[0] * y[places[0]] + ..., one after the other in float32, rounded once
"""

import torch


def combine_ref(
    y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The same in torch."""
    out = residual.float()
    for k in range(places.shape[1]):
        place = places[:, k].long()
        term = y[place.clamp(min=0)].float() * weights[:, k, None]
        out = out + term.masked_fill(place[:, None] < 0, 0.0)
    return out.to(residual.dtype)

"""Which experts a row goes to, and with what weights: DeepSeek-V3's routing without an auxiliary loss (noaux_tc).

logits   [rows, experts]  float32
bias     [experts]        float32; steers the choice only, never the weights
ids      [rows, top_k]    int32, ascending
weights  [rows, top_k]    float32, of the expert in the same place
Source: DeepSeek-V3 2024, section 2.1.2; the group limit as in DeepSeek-V2 2024, section 2.2.2.

Scores are sigmoids. A group's worth is the sum of its two best biased scores; experts outside of the best groups are
never chosen, however low the others score. Equal scores go to the lowest id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headrace_kernels.ops import Routing


def route_ref(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    scores = logits.float().sigmoid()
    choice = scores + bias.float()
    grouped = choice.unflatten(-1, (routing.groups, -1))  # [rows, groups, experts of a group]
    worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = _first_best(worth, routing.top_groups)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, kept, False)
    choice = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = _first_best(choice, routing.top_k).sort(-1).values
    weights = scores.gather(-1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scale


def _first_best(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of each row; of equals the first. `topk` promises no order of them."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]

"""How far drafts are from what the model says: cross-entropy with the model's own likely tokens.

The logits of the draft vocabulary are by far the largest thing of a step, so loss and gradient are made in one go, some
rows at a time, and the logits are never kept.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ROWS = 512  # of logits at a time; a guess that keeps them near the cache


class Distill(torch.autograd.Function):
    """Sum over rows of `-sum_k p_k log softmax(x head^T)[id_k]`; tokens outside the draft vocabulary have p 0.

    x [rows, hidden], head [draft vocabulary, hidden] in the dtype of the product, ids and p [rows, k].
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, p: torch.Tensor
    ) -> torch.Tensor:
        grad = torch.empty_like(x)
        total = x.new_zeros(())
        for at in range(0, len(x), CHUNK_ROWS):
            rows = slice(at, at + CHUNK_ROWS)
            logits = (x[rows].to(head.dtype) @ head.T).float()
            best = logits.amax(1, keepdim=True)
            found = logits.gather(1, ids[rows])
            weights = logits.sub_(best).exp_()
            normaliser = weights.sum(1, keepdim=True)
            mass = p[rows].sum(1, keepdim=True)
            log_total = best + normaliser.log()
            total += (p[rows] * (log_total - found)).sum()
            weights.mul_(mass / normaliser).scatter_add_(1, ids[rows], -p[rows])
            grad[rows] = (weights.to(head.dtype) @ head).float()
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grads[0] * grad, None, None, None

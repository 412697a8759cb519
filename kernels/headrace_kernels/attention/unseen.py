"""Values of tokens that only some rows of a tile see.

A row gives a token that it does not see the weight 0, but 0 * NaN is NaN: the newer rows of a prompt would spoil older
ones, and with them blocks of the cache that other requests share. So attention goes over the tiles that all of its rows
see in whole first, as they are. In those that a row sees in part, values go through `finite_values`, and the scores of
broken tokens become NaN before the mask, so that rows which see them get one. The order of sums stays what it was.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def finite_values(value) -> tuple[Any, Any]:
    """`value` [tokens, dim] with zeros for what is not finite, and which tokens have such a value."""
    finite = tl.abs(value) < float("inf")
    broken = tl.min(finite.to(tl.int32), axis=1) == 0
    return tl.where(finite, value, 0.0).to(value.dtype), broken


@triton.jit
def finite_or_nan(scores) -> tl.tensor:
    """`scores` with NaN for what is not finite, before the mask: a score of -inf would be as if it were not seen."""
    return tl.where(tl.abs(scores) < float("inf"), scores, float("nan"))


def finite_values_ref(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, of `[..., dim]`; scores of broken tokens are NaN before the mask."""
    finite = values.isfinite()
    return values.where(finite, 0.0), ~finite.all(-1)


def finite_or_nan_ref(scores: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    return scores.where(scores.isfinite(), torch.nan)

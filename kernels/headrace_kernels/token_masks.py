"""Logits of tokens that may not be chosen become -inf, where torch has them.

logits  [rows, vocab]            changed in place
rows    [masked]                 int64 on the host, which rows of `logits` have a mask
masks   [masked, vocab/32 up]    uint32 on the host, bit `t % 32` of word `t // 32` is set where token `t` may be chosen
Cost: on a GPU copies vocab / 8 bytes a row, then reads the masks and writes what they forbid there, by a kernel of
Triton (`dense/mask_rows.py`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_kernels.upload import upload


def mask_logits(logits: torch.Tensor, rows: NDArray[np.int64], masks: NDArray[np.uint32]) -> None:
    """In place: by Triton on a GPU, by torch elsewhere."""
    index = upload(rows, logits.device)
    words = upload(masks.view(np.int32), logits.device)
    if logits.device.type != "cuda":
        mask_by_torch(logits, index, words)
        return
    from headrace_kernels.dense.mask_rows import mask_rows  # Triton is not everywhere

    mask_rows(logits, index, words)


def mask_by_torch(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """With `rows`, and `masks` as int32, where the logits are."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -math.inf)


def mask_logits_ref(
    logits: torch.Tensor, rows: NDArray[np.int64], masks: NDArray[np.uint32]
) -> None:
    """Token by token."""
    for row, mask in zip(rows.tolist(), masks, strict=True):
        for token in range(logits.shape[1]):
            if not int(mask[token // 32]) >> (token % 32) & 1:
                logits[row, token] = -math.inf

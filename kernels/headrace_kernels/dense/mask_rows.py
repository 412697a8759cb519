"""Logits of tokens that may not be chosen become -inf, in the rows that have a mask.

logits  [rows, vocab]            changed in place; a row may be longer in memory
rows    [masked]                 int64, each row at most once
masks   [masked, vocab/32 up]    int32, bit `t % 32` of word `t // 32` is set where token `t` may be chosen
Cost: reads vocab / 8 bytes a masked row and writes what they forbid; logits are not read. Memory bandwidth is the bound
where masks forbid much, launch time where there are few rows.
Source: packed masks as xgrammar and llguidance have them; the kernel is ours. Run on an H100 and an H200.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.token_masks import mask_by_torch

WORDS = 32  # of a mask, in one program; a guess, not tuned yet


@triton.jit
def _mask_rows_kernel(logits_ptr, rows_ptr, masks_ptr, vocab, row_stride, WORDS: tl.constexpr):
    masked = tl.program_id(0).to(tl.int64)
    words = (vocab + 31) // 32
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    allowed = tl.load(masks_ptr + masked * words + word, mask=word < words, other=-1)
    bit = tl.arange(0, 32)
    forbidden = ((allowed[:, None] >> bit[None, :]) & 1) == 0
    token = word[:, None] * 32 + bit[None, :]
    row = tl.load(rows_ptr + masked)  # int64: row * row_stride passes 2**31
    nothing = tl.full((WORDS, 32), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + token, nothing, mask=forbidden & (token < vocab))


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask these rows in place; all others stay as they are."""
    assert logits.dim() == 2 and logits.stride(1) == 1
    words = -(-logits.shape[1] // 32)
    assert masks.shape == (len(rows), words) and masks.is_contiguous()
    assert masks.dtype == torch.int32 and rows.dtype == torch.int64
    if len(rows):
        _mask_rows_kernel[(len(rows), triton.cdiv(words, WORDS))](
            logits, rows, masks, logits.shape[1], logits.stride(0), WORDS=WORDS
        )


def mask_rows_ref(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """The same in torch."""
    mask_by_torch(logits, rows, masks)


def mask_rows_bytes(masked: int, vocab: int, element_bytes: int) -> int:
    """Bytes that must move where masks forbid all: masks and rows in, logits out."""
    return masked * (4 * -(-vocab // 32) + 8 + vocab * element_bytes)

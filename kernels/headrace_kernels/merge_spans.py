"""Sum the spans of attention that were computed apart, by the log-sum-exp of their scores.

part  [spans, places, dim]  float32; attention over one span each, a place is a row and head
lse   [spans, places]       float32; log-sum-exp of the span's scores, -inf where nothing was seen
out   [places, dim]         zeros where no span saw anything
Cost: reads part and lse, writes out; memory bandwidth is the bound.
Source: Dao 2023 (online softmax), applied to spans.

Batch invariance: spans are added in order, and one that saw nothing adds exact zeros, so more spans change no bit.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow


@triton.jit(do_not_specialize=["spans", "places"])
def _merge_spans_kernel(
    part_ptr, lse_ptr, out_ptr, spans, places,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_TILE)
    best = -float("inf")
    for span in range(spans):
        best = tl.maximum(best, tl.load(lse_ptr + span * places + place))
    pivot = tl.where(best == -float("inf"), 0.0, best)
    acc = tl.zeros((DIM_TILE,), dtype=tl.float32)
    total = 0.0
    for span in range(spans):
        weight = tl.exp(tl.load(lse_ptr + span * places + place) - pivot)
        part = tl.load(part_ptr + (span * places + place) * DIM + d, mask=d < DIM, other=0.0)
        acc += weight * part
        total += weight
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + place * DIM + d, narrow(out, out_ptr.dtype.element_ty, INTERPRET), mask=d < DIM
    )


def merge_spans(part: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out`, which the caller owns, and return it."""
    spans, places, dim = part.shape
    assert lse.shape == (spans, places) and out.shape == (places, dim)
    assert part.is_contiguous() and lse.is_contiguous() and out.is_contiguous()
    if places:
        _merge_spans_kernel[(places,)](
            part, lse, out, spans, places,
            DIM=dim, DIM_TILE=triton.next_power_of_2(dim), INTERPRET=INTERPRET,
        )  # fmt: skip
    return out


def merge_spans_ref(part: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    best = lse.max(0).values
    weights = (lse - best.where(best > -torch.inf, 0.0)).exp()
    total = weights.sum(0)
    total = total.where(total > 0, 1.0)
    return out.copy_((weights[..., None] * part).sum(0) / total[:, None])


def merge_spans_bytes(spans: int, places: int, dim: int, element_bytes: int) -> int:
    """Bytes that must move: parts and their log-sum-exps in, the result out."""
    return 4 * spans * places * (dim + 1) + element_bytes * places * dim

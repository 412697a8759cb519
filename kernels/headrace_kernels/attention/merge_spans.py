"""Sum the spans of attention that were computed apart, by the log-sum-exp of their scores.

part  [parts, heads, dim]  float32; attention over one span each
lse   [parts, heads]       float32; log-sum-exp of the span's scores, -inf where nothing was seen
rows  [3, all rows]        int32; where a row's first span is in `part`, the step from span to span, how many there are
out   [rows, heads, dim]   of the rows from `first_row` on; zeros where no span saw anything
Cost: reads part and lse, writes out; memory bandwidth is the bound.
Source: Dao 2023 (online softmax), applied to spans.

Batch invariance: a row's spans are added in order, and one that saw nothing adds exact zeros.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.interpret import INTERPRET, narrow


@triton.jit(do_not_specialize=["first_row", "all_rows"])
def _merge_spans_kernel(
    part_ptr, lse_ptr, rows_ptr, out_ptr, first_row, all_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64)  # row of `out`
    head = tl.program_id(1)
    row = first_row + here
    first = tl.load(rows_ptr + row).to(tl.int64)
    step = tl.load(rows_ptr + all_rows + row).to(tl.int64)
    spans = tl.load(rows_ptr + 2 * all_rows + row)
    d = tl.arange(0, DIM_TILE)
    best = -float("inf")
    for span in range(spans):
        best = tl.maximum(best, tl.load(lse_ptr + (first + span * step) * HEADS + head))
    pivot = tl.where(best == -float("inf"), 0.0, best)
    acc = tl.zeros((DIM_TILE,), dtype=tl.float32)
    total = 0.0
    for span in range(spans):
        place = (first + span * step) * HEADS + head
        weight = tl.exp(tl.load(lse_ptr + place) - pivot)
        part = tl.load(part_ptr + place * DIM + d, mask=d < DIM, other=0.0)
        acc += weight * part
        total += weight
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + (here * HEADS + head) * DIM + d,
        narrow(out, out_ptr.dtype.element_ty, INTERPRET),
        mask=d < DIM,
    )


def merge_spans(
    part: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """Fill `out`, which the caller owns, and return it."""
    parts, heads, dim = part.shape
    assert lse.shape == (parts, heads) and out.shape[1:] == (heads, dim)
    assert rows.shape[0] == 3 and first_row + len(out) <= rows.shape[1]
    assert part.is_contiguous() and lse.is_contiguous() and out.is_contiguous()
    assert rows.is_contiguous()
    if len(out):
        _merge_spans_kernel[(len(out), heads)](
            part, lse, rows, out, first_row, rows.shape[1],
            HEADS=heads, DIM=dim, DIM_TILE=triton.next_power_of_2(dim), INTERPRET=INTERPRET,
        )  # fmt: skip
    return out


def merge_spans_ref(
    part: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """The same in torch, one row after the other."""
    for row, (first, step, spans) in enumerate(rows.T[first_row : first_row + len(out)].tolist()):
        places = slice(first, first + step * spans, step)
        best = lse[places].amax(0) if spans else lse.new_full(lse.shape[1:], -torch.inf)
        weights = (lse[places] - best.where(best != -torch.inf, 0.0)).exp()
        total = weights.sum(0)
        total = total.where(total != 0, 1.0)
        out[row] = (weights[..., None] * part[places]).sum(0) / total[:, None]
    return out


def merge_spans_bytes(parts: int, rows: int, heads: int, dim: int, element_bytes: int) -> int:
    """Bytes that must move: parts and their log-sum-exps in, the result out."""
    return 4 * parts * heads * (dim + 1) + element_bytes * rows * heads * dim

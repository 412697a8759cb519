"""Results to the ranks that the rows came from, each straight to the place where that rank sums them.

bases    [ranks]              int64; addresses of the windows of all ranks (window.py)
y        [m, result_words]    int32; results as 32-bit words
places   [n, width]           int32; which rows of `y` are of each received row, -1 where there are fewer; `width` is
                              top_k, or 1 where they are summed here
which    [n]                  int32; where the received rows are in this rank's window: source * most_rows + place
rows     [ranks * most_rows]  int32; which row of its rank each is; `columns` likewise (window.py)
results  [most_rows, answers, result_words]  of the window of the row's rank: by expert, or by rank where summed
Cost: reads each result once and writes it once; the links between GPUs are the bound.
Source: ours; the one-sided exchange of TensorRT-LLM (blog 18) pulls one sum a rank, this one also returns results one
by one, which are summed in the order of experts. Compiled for compute capability 9.0, not run on a GPU yet.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.one_sided.window import Window

TILE = 1024  # words; a guess, not tuned yet


@triton.jit
def _return_rows_kernel(
    bases_ptr, y_ptr, places_ptr, which_ptr, rows_ptr, columns_ptr, most_rows, results_at,
    WIDTH: tl.constexpr, ANSWERS: tl.constexpr, SUMMED: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    place = tl.load(places_ptr + i * WIDTH + k).to(tl.int64)
    if place < 0:
        return
    at = tl.load(which_ptr + i)
    row = tl.load(rows_ptr + at).to(tl.int64)
    column = k
    if SUMMED:
        column = tl.load(columns_ptr + at)
    col = tl.program_id(2) * TILE + tl.arange(0, TILE)
    y = tl.load(y_ptr + place * WORDS + col, mask=col < WORDS, other=0)
    base = tl.load(bases_ptr + at // most_rows)
    results = (base + results_at).to(tl.pointer_type(tl.int32))
    tl.store(results + (row * ANSWERS + column) * WORDS + col, y, mask=col < WORDS)


def return_rows(
    window: Window,
    bases: torch.Tensor,
    y: torch.Tensor,
    places: torch.Tensor,
    which: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """Write the results of received rows into the windows of their ranks."""
    n, width = places.shape
    words = y.view(torch.int32)
    assert words.shape[1] == window.result_words and y.is_contiguous() and places.is_contiguous()
    assert places.dtype == which.dtype == rows.dtype == columns.dtype == torch.int32
    assert which.shape == (n,) and bases.dtype == torch.int64
    assert width == (window.top_k if window.combine == "exact" else 1)
    if n and len(y):
        _return_rows_kernel[(n, width, triton.cdiv(window.result_words, TILE))](
            bases, words, places, which, rows, columns, window.most_rows, window.parts["results"].offset,
            WIDTH=width, ANSWERS=window.answers, SUMMED=window.combine == "partial",
            WORDS=window.result_words, TILE=TILE,
        )  # fmt: skip


def return_rows_ref(
    window: Window,
    buffers: list[torch.Tensor],
    y: torch.Tensor,
    places: torch.Tensor,
    which: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """The same in torch, into buffers of this process."""
    received, k = (places >= 0).nonzero(as_tuple=True)
    at = which[received].long()
    column = k if window.combine == "exact" else columns[at].long()
    value = y.view(torch.int32)[places[received, k].long()]
    for to, buffer in enumerate(buffers):
        mine = at // window.most_rows == to
        shape = window.most_rows, window.answers, window.result_words
        results = window.view(buffer, "results", torch.int32, *shape)
        results[rows[at[mine]].long(), column[mine]] = value[mine]


def return_rows_bytes(window: Window, results: int) -> int:
    """Bytes that must move: each result in and out."""
    return 8 * results * window.result_words

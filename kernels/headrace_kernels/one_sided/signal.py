"""A flag in every other rank's window: what this rank wrote there before is there.

bases   [ranks]  int64; addresses of the windows of all ranks (window.py)
epoch   [1]      int64; on the device, so that a recorded graph counts on
counts  [ranks]  int32; what each rank is told, such as the rows that came to it
flag    epoch * 2**20 + count, at `flags[kind, rank]` of each window
Cost: one atomic exchange for each rank; the latency of the links is the bound.
Source: epoch flags as in the one-sided exchange of TensorRT-LLM (blog 18); the count inside of the flag is ours, so
that it needs no order of its own. Compiled for compute capability 9.0, not run on a GPU yet.

The release is at system scope, and all that the kernels before wrote in the same stream comes before it. Epochs are the
same on all ranks and only grow, so that a flag never has to be taken back.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.one_sided.window import COUNT_BITS, Window

ROWS, RESULTS = 0, 1  # kinds
LAUNCH = {"num_warps": 1}


@triton.jit(do_not_specialize=["rank", "kind", "flags_at"])
def _signal_kernel(
    bases_ptr, counts_ptr, epoch_ptr, rank, kind, flags_at, RANKS: tl.constexpr, BITS: tl.constexpr
):
    to = tl.program_id(0)
    flags = (tl.load(bases_ptr + to) + flags_at).to(tl.pointer_type(tl.int64))
    value = (tl.load(epoch_ptr) << BITS) + tl.load(counts_ptr + to).to(tl.int64)
    tl.atomic_xchg(flags + kind * RANKS + rank, value, sem="release", scope="sys")


def signal(
    window: Window,
    bases: torch.Tensor,
    rank: int,
    kind: int,
    epoch: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Tell all ranks, this one too."""
    assert counts.shape == bases.shape == (window.ranks,) and counts.dtype == torch.int32
    assert bases.dtype == epoch.dtype == torch.int64 and epoch.shape == (1,)
    flags_at = window.parts["flags"].offset
    _signal_kernel[(window.ranks,)](
        bases, counts, epoch, rank, kind, flags_at, RANKS=window.ranks, BITS=COUNT_BITS, **LAUNCH
    )


def signal_ref(
    window: Window,
    buffers: list[torch.Tensor],
    rank: int,
    kind: int,
    epoch: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """The same in torch, into buffers of this process."""
    for to, buffer in enumerate(buffers):
        flags = window.view(buffer, "flags", torch.int64, 2, window.ranks)
        flags[kind, rank] = (int(epoch) << COUNT_BITS) + int(counts[to])


def signal_bytes(ranks: int) -> int:
    """Bytes that must move: bases and counts in, flags out."""
    return 20 * ranks

"""Wait for the flags of all ranks in this rank's window.

flags   [ranks]  int64; epoch * 2**20 + count, by the rank that wrote (signal.py)
epoch   [1]      int64; that is waited for
counts  [ranks]  int32; what each rank told; -1 where it did not come in time
Cost: polls this rank's own memory; the slowest rank is the bound.
Source: as signal.py. Compiled for compute capability 9.0, not run on a GPU yet.

A program waits for one rank, never for another program of the launch. The number of polls is bounded, so that a rank
that is gone leaves the device in order and is named by its -1.
"""

import torch
import triton
import triton.language as tl

from headrace_kernels.one_sided.window import COUNT_BITS

MOST_POLLS = 1 << 24  # some seconds on a GPU; a guess
LAUNCH = {"num_warps": 1}


@triton.jit(do_not_specialize=["most_polls"])
def _wait_kernel(flags_ptr, counts_ptr, epoch_ptr, most_polls, BITS: tl.constexpr):
    source = tl.program_id(0)
    epoch = tl.load(epoch_ptr)
    flag = tl.atomic_add(flags_ptr + source, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
    polls = 0
    while ((flag >> BITS) < epoch) & (polls < most_polls):
        flag = tl.atomic_add(
            flags_ptr + source, tl.full((), 0, tl.int64), sem="acquire", scope="sys"
        )
        polls += 1
    count = tl.where((flag >> BITS) >= epoch, flag - ((flag >> BITS) << BITS), -1)
    tl.store(counts_ptr + source, count.to(tl.int32))


def wait(flags: torch.Tensor, epoch: torch.Tensor, most_polls: int = MOST_POLLS) -> torch.Tensor:
    """What each rank told with the signal of this epoch."""
    assert flags.dtype == epoch.dtype == torch.int64 and epoch.shape == (1,)
    assert flags.is_contiguous() and flags.dim() == 1
    counts = torch.empty(len(flags), dtype=torch.int32, device=flags.device)
    _wait_kernel[(len(flags),)](flags, counts, epoch, most_polls, BITS=COUNT_BITS, **LAUNCH)
    return counts


def wait_ref(flags: torch.Tensor, epoch: torch.Tensor) -> torch.Tensor:
    """The same in torch, where the flags are there or do not come any more."""
    return torch.where(flags >> COUNT_BITS >= epoch, flags & ((1 << COUNT_BITS) - 1), -1).int()


def wait_bytes(ranks: int) -> int:
    """Bytes that must move: flags in, counts out."""
    return 12 * ranks

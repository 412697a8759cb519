"""Windows of ranks in torch's symmetric memory: GPUs of one NVLink domain that write into each other's memory.

`torch.distributed._symmetric_memory` allocates a tensor on each rank and maps those of the others; the kernels of
`one_sided/` get their addresses. Its interface is that of torch 2.15, which calls it alpha. CUDA alone has such memory.
Not run on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch

from headrace_kernels.one_sided.dispatch import OneSidedGroup
from headrace_kernels.one_sided.window import Window

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGN = 16  # bytes; of addresses, which Triton takes as a promise of wide accesses


class Mapped(Protocol):
    """What a rendezvous gives (`_SymmetricMemory`)."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """That rank's tensor, as it is seen from here."""
        ...

    def barrier(self) -> None:
        """In the device's queue: all ranks have come here."""
        ...


class MemoryOfGroup(Protocol):
    """What is used of `torch.distributed._symmetric_memory`."""

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def rendezvous(self, tensor: torch.Tensor, group: ProcessGroup) -> Mapped: ...


def open_windows(
    window: Window,
    group: ProcessGroup,
    device: torch.device,
    *,
    whole: bool = False,
    memory: MemoryOfGroup | None = None,
) -> OneSidedGroup:
    """This rank's window, and those of all ranks of the group, which call this together. Once for all layers.

    Raises ValueError where the group is of another size, or `device` has no symmetric memory.
    """
    if memory is None:
        if device.type != "cuda":
            raise ValueError(f"symmetric memory is for GPUs, not for {device.type}")
        from torch.distributed import _symmetric_memory

        memory = cast("MemoryOfGroup", _symmetric_memory)
    buffer = memory.empty(window.nbytes, dtype=torch.uint8, device=device)
    mapped = memory.rendezvous(buffer, group)
    if mapped.world_size != window.ranks:
        raise ValueError(f"a group of {mapped.world_size} ranks, a window for {window.ranks}")
    size = (window.nbytes,)
    seen = [mapped.get_buffer(rank, size, torch.uint8) for rank in range(window.ranks)]
    bases = [one.data_ptr() for one in seen]
    if odd := [base for base in bases if base % ALIGN]:
        raise ValueError(f"a window begins at {odd[0]:#x}, which {ALIGN} does not divide")
    buffer.zero_()
    mapped.barrier()  # nobody writes into a window that its rank has yet to clear
    opened = OneSidedGroup(window, mapped.rank, buffer, bases, whole=whole)
    opened.holds = (mapped, seen)
    return opened

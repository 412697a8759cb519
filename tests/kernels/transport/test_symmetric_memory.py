"""Windows in the memory of a group: addresses are those that a rank sees, and nothing starts before all are clear.

Torch has such memory for CUDA alone. Here the ranks' tensors are in this process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.one_sided.window import Window
from headrace_kernels.transport.symmetric_memory import open_windows

CPU = torch.device("cpu")
WINDOW = Window(
    ranks=2, most_rows=3, hidden=8, top_k=2, combine="exact", dtype=torch.float32
)  # fmt: skip


class OneProcess:
    """The memory of all ranks, of which each call is one rank's."""

    def __init__(self, ranks: int, offset: int = 0) -> None:
        self.buffers = [
            torch.full((WINDOW.nbytes + 64,), 7, dtype=torch.uint8) for _ in range(ranks)
        ]
        self.buffers = [buffer[offset : offset + WINDOW.nbytes] for buffer in self.buffers]
        self.rank = 0
        self.barriers: list[tuple[int, int]] = []  # rank, and what its window held

    @property
    def world_size(self) -> int:
        return len(self.buffers)

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert (size, dtype, device) == ((WINDOW.nbytes,), torch.uint8, CPU)
        return self.buffers[self.rank]

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> OneProcess:
        assert tensor is self.buffers[self.rank] and group is None
        return self

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert (sizes, dtype) == ((WINDOW.nbytes,), torch.uint8)
        return self.buffers[rank]

    def barrier(self) -> None:
        self.barriers.append((self.rank, int(self.buffers[self.rank].sum())))


def opened(memory: OneProcess, rank: int) -> Any:
    memory.rank = rank
    group: Any = None
    return open_windows(WINDOW, group, CPU, memory=memory)


def test_ranks_reach_each_others_windows_once_they_are_clear() -> None:
    memory = OneProcess(2)
    groups = [opened(memory, rank) for rank in range(2)]
    assert memory.barriers == [(0, 0), (1, 0)]
    for rank, group in enumerate(groups):
        assert group.rank == rank and group.buffer is memory.buffers[rank]
        assert group.bases.tolist() == [buffer.data_ptr() for buffer in memory.buffers]
        dispatch = group.dispatch(LayerPlacement.even(4, 2))
        assert (dispatch.owner.tolist(), dispatch.slot.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 3 ranks, a window for 2"):
        opened(OneProcess(3), 0)


def test_a_window_at_an_odd_address_is_refused() -> None:
    with pytest.raises(ValueError, match="which 16 does not divide"):
        opened(OneProcess(2, offset=4), 0)


def test_a_cpu_has_no_such_memory() -> None:
    group: Any = None
    with pytest.raises(ValueError, match="symmetric memory is for GPUs, not for cpu"):
        open_windows(WINDOW, group, CPU)

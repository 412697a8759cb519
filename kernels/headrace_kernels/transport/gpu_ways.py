"""The ways that GPUs have between each other: windows in symmetric memory, and DeepEP. Not run on a GPU yet.

They carry rows of layers and nothing else. A rank that fails inside of a round does not tell the others by them: the
others miss it there, and the group is over.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from headrace_kernels.transport.ways import GroupSite, RankWay, RoundListener

if TYPE_CHECKING:
    from headrace_kernels.one_sided.dispatch import OneSidedGroup

SYMMETRIC_MEMORY, DEEP_EP = "symmetric-memory", "deep-ep"


def why_no_symmetric_memory(site: GroupSite) -> str | None:
    """None where it may be opened."""
    if (why := _why_no_gpu(site)) is not None:
        return why
    if not site.one_host:
        return "the ranks are on several machines, and it is for GPUs that share one NVLink domain"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which its kernels are written in"
    return None


def why_no_deep_ep(site: GroupSite) -> str | None:
    """None where it may be opened."""
    if (why := _why_no_gpu(site)) is not None:
        return why
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed: see its repository, deepseek-ai/DeepEP"
    if site.shape.combine != "partial":
        return "it sums what ranks return in its own order: give --ep-combine partial"
    if site.shape.dtype != torch.bfloat16:
        return f"its rows are bfloat16, not {str(site.shape.dtype).removeprefix('torch.')}"
    return None


def _why_no_gpu(site: GroupSite) -> str | None:
    if site.device.type != "cuda":
        return f"it is for GPUs, and this rank computes on the {site.device.type}"
    if site.carries_experts:
        return "it carries no experts: leave --ep-rebalance-rounds out"
    return None


def open_symmetric_memory(site: GroupSite) -> RankWay:
    """Raises ValueError and RuntimeError."""
    from headrace_kernels.one_sided.window import Window
    from headrace_kernels.transport.symmetric_memory import open_windows

    shape = site.shape
    window = Window(
        ranks=site.ranks,
        most_rows=shape.most_rows,
        hidden=shape.hidden,
        top_k=shape.top_k,
        combine=shape.combine,
        dtype=shape.dtype,
    )
    opened = open_windows(window, torch_group(site), site.device)
    opened.on_lost = site.on_lost
    return RankWay(OneSidedRounds(opened), opened.dispatch)


def open_deep_ep(site: GroupSite) -> RankWay:
    """Raises ValueError and RuntimeError."""
    from headrace_kernels.moe.placement import LayerPlacement
    from headrace_kernels.transport.deep_ep import DeepEpDispatch, open_buffer

    buffer = open_buffer(torch_group(site), site.shape.hidden)

    def make(placement: LayerPlacement) -> DeepEpDispatch:
        return DeepEpDispatch.of(placement, buffer, site.rank, site.device)

    return RankWay(NoRounds(), make)


def torch_group(site: GroupSite) -> dist.ProcessGroup:
    """All ranks of the group as torch knows them, by which memory is mapped. Made once in a process."""
    if not dist.is_initialized():
        torch.cuda.set_device(site.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("torch", site.store),
            rank=site.rank,
            world_size=site.ranks,
            device_id=site.device,
        )
    group = dist.group.WORLD
    assert group is not None, "it was made"
    return group


@dataclass(frozen=True, slots=True)
class OneSidedRounds(RoundListener):
    """What windows are told of rounds."""

    group: OneSidedGroup

    def begin(self, round_number: int) -> None:
        self.group.begin(round_number)

    def abort(self, reason: str) -> None:
        """The others wait for flags that do not come, and name this rank."""

    def close(self) -> None:
        """The windows go with the process: another rank may still write into this one's."""


class NoRounds(RoundListener):
    """Of a way that keeps count by itself."""

    def begin(self, round_number: int) -> None:
        """Nothing is left of the round before."""

    def abort(self, reason: str) -> None:
        """The others wait in vain, and name this rank."""

    def close(self) -> None:
        """Its memory goes with the process."""

"""The ways in which rows may go between the ranks of a group, as far as this host and device have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine, Dispatch
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import NativeTransport, OnLost, Transport

if TYPE_CHECKING:
    import torch.distributed as dist


NO_MEMORY = "shared-memory/failed"  # in the store of the group: a rank could not make or open it


class RoundListener(Protocol):
    """What of a way is told where the group is; a `Transport` is one."""

    def begin(self, round_number: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankWay:
    """One that all ranks have opened."""

    rounds: RoundListener
    dispatch: Callable[[LayerPlacement], Dispatch]
    native: bool = False  # recorded programs of the CPU exchange rows by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A layer of experts, as far as exchanges depend on it."""

    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    combine: Combine
    most_rows: int  # of one rank in a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSite:
    """Where this rank and the others are, and how they find each other."""

    rank: int
    ranks: int
    one_host: bool
    shape: ExpertsShape
    memory: Path  # a name that this group alone has, for ranks of one host
    store: dist.Store  # that rank 0 keeps and all reach
    deadline_s: float
    meeting_s: float
    # What a group puts around each transport, so that all ranks name the same lost rank.
    watch: Callable[[Transport], Transport] = lambda transport: transport
    # The same for a way that is no transport.
    on_lost: OnLost | None = None
    # Experts move between steps, by the same way as rows.
    carries_experts: bool = False

    @property
    def device(self) -> torch.device:
        return self.shape.device


def ways(site: GroupSite, named: str | None = None) -> Mapping[str, Callable[[], RankWay]]:
    """By name, in the order in which equals are preferred. All ranks open them in this order.

    What has not run on a GPU yet is among them only where it is `named`. What is named and is not there says why when
    it is opened: so the ranks that have it learn of the one that does not.
    """
    from headrace_kernels.transport import gpu_ways as gpu

    found: dict[str, Callable[[], RankWay]] = {}
    if site.one_host:
        found["shared-memory"] = partial(_shared_memory, site)
    found["gloo"] = partial(_gloo, site)
    if named == "shared-memory" and not site.one_host:
        found[named] = partial(_refuse, "the ranks are on several machines; leave the flag out")
    if named == gpu.SYMMETRIC_MEMORY:
        why = gpu.why_no_symmetric_memory(site)
        found[named] = partial(_refuse, why) if why else partial(gpu.open_symmetric_memory, site)
    if named == gpu.DEEP_EP:
        why = gpu.why_no_deep_ep(site)
        found[named] = partial(_refuse, why) if why else partial(gpu.open_deep_ep, site)
    return found


def _refuse(why: str) -> RankWay:
    raise ValueError(why)


def _shared_memory(site: GroupSite) -> RankWay:
    from headrace_kernels.transport.shared_memory import SharedMemory

    try:
        transport = SharedMemory.join(
            site.memory,
            rank=site.rank,
            ranks=site.ranks,
            deadline_s=site.deadline_s,
            meeting_s=site.meeting_s,
            given_up=lambda: site.store.check([NO_MEMORY]),
        )
    except OSError:
        site.store.set(NO_MEMORY, "")  # the others are not to wait for a file
        raise
    return by_parcels(transport, site)


def _gloo(site: GroupSite) -> RankWay:
    from headrace_kernels.transport.gloo import Gloo

    transport = Gloo(site.store, rank=site.rank, ranks=site.ranks, deadline_s=site.deadline_s)
    return by_parcels(transport, site)


def by_parcels(transport: Transport, site: GroupSite) -> RankWay:
    native = isinstance(transport, NativeTransport) and site.device.type == "cpu"
    transport = site.watch(transport)
    combine, device = site.shape.combine, site.device
    make = partial(AllToAll.of, transport=transport, combine=combine, device=device)
    return RankWay(transport, make, native)

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
from headrace_kernels.moe.transport import NativeTransport, Transport

if TYPE_CHECKING:
    import torch.distributed as dist


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
class GroupSite:
    """Where this rank and the others are, and how they find each other."""

    rank: int
    ranks: int
    one_host: bool
    device: torch.device
    memory: Path  # a name that this group alone has, for ranks of one host
    store: dist.Store  # that rank 0 keeps and all reach
    combine: Combine
    deadline_s: float
    meeting_s: float
    # What a group puts around each transport, so that all ranks name the same lost rank.
    watch: Callable[[Transport], Transport] = lambda transport: transport


def ways(site: GroupSite) -> Mapping[str, Callable[[], RankWay]]:
    """By name, in the order in which equals are preferred. All ranks open them in this order."""
    found: dict[str, Callable[[], RankWay]] = {}
    if site.one_host:
        found["shared-memory"] = partial(_shared_memory, site)
    found["gloo"] = partial(_gloo, site)
    return found


def _shared_memory(site: GroupSite) -> RankWay:
    from headrace_kernels.transport.shared_memory import SharedMemory

    transport = SharedMemory.join(
        site.memory,
        rank=site.rank,
        ranks=site.ranks,
        deadline_s=site.deadline_s,
        meeting_s=site.meeting_s,
    )
    return by_parcels(transport, site)


def _gloo(site: GroupSite) -> RankWay:
    from headrace_kernels.transport.gloo import Gloo

    transport = Gloo(site.store, rank=site.rank, ranks=site.ranks, deadline_s=site.deadline_s)
    return by_parcels(transport, site)


def by_parcels(transport: Transport, site: GroupSite) -> RankWay:
    native = isinstance(transport, NativeTransport) and site.device.type == "cpu"
    transport = site.watch(transport)
    make = partial(AllToAll.of, transport=transport, combine=site.combine, device=site.device)
    return RankWay(transport, make, native)

"""Where a source is, and what it can do: `shm:NAME`, `cuda-ipc:NAME`, `nixl:HOST:PORT`, `tcp:HOST:PORT`.

`NAME` is of an abstract Unix socket, which exists inside one network namespace only: from another host there is simply
nobody there. Endpoints with one address are back-ends on one connection; the handshake chooses among them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.errors import MissingExtra
from headrace.kv_transfer.backends.base import Exporter, Mover
from headrace.kv_transfer.backends.cuda_ipc import CudaIpcExporter, CudaIpcMover
from headrace.kv_transfer.backends.nixl import NixlExporter, NixlMover, find_nixl
from headrace.kv_transfer.backends.shm import ShmExporter, ShmMover
from headrace.kv_transfer.backends.tcp import TcpExporter

if TYPE_CHECKING:
    from headrace_kernels.ops import KvPool

log = logging.getLogger(__name__)

LOCAL: Final = ("cuda-ipc", "shm")  # through a Unix socket; best first
REMOTE: Final = ("nixl", "tcp")
MAX_ENDPOINTS: Final = 16


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Where to dial, and what may be done there, best first."""

    target: str | tuple[str, int]  # name of an abstract Unix socket, or host and port
    backends: list[str]

    def __str__(self) -> str:
        if isinstance(self.target, str):
            return f"local:{self.target}"
        return "{}:{}".format(*self.target)


@dataclass(slots=True)
class Exporters:
    """Back-ends of a source, best first."""

    local: list[Exporter] = field(default_factory=list[Exporter])
    remote: list[Exporter] = field(default_factory=list[Exporter])


def addresses(endpoints: Sequence[str], able: Sequence[str]) -> list[SourceAddress]:
    """Where to dial, best first, and which of the `able` back-ends to offer there. Unknown endpoints are left out."""
    found: dict[str | tuple[str, int], SourceAddress] = {}
    for endpoint in endpoints[:MAX_ENDPOINTS]:
        backend, _, rest = endpoint.partition(":")
        target = _target(backend, rest)
        if backend == "nixl" and backend in able and find_nixl() is None:
            continue  # then the same address by TCP
        if target is not None and backend in able:
            address = found.setdefault(target, SourceAddress(target, []))
            if backend not in address.backends:
                address.backends.append(backend)
    return list(found.values())


def _target(backend: str, rest: str) -> str | tuple[str, int] | None:
    if backend in LOCAL:
        return rest or None
    if backend not in REMOTE:
        return None
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        return None
    return host, int(port)


def exporters_for(pool: KvPool, wanted: Sequence[str] | None) -> Exporters:
    """What a source of this pool offers: `wanted`, or everything that makes sense for it.

    NIXL is offered by itself for device memory only: between CPUs plain TCP is quicker (bench/results/transfer.json).
    It is left out, with a warning, where it is installed and cannot register that memory: its UCX may be built without
    CUDA. Raises ValueError for a wanted back-end that cannot be.
    """
    if wanted is None:
        if pool.device != "cpu":
            offered = exporters_for(pool, ["cuda-ipc", "tcp"])
            if find_nixl() is not None:
                try:
                    offered.remote.insert(0, _exporter("nixl", pool))
                except ValueError as error:
                    log.warning("transfer: only TCP is offered to other hosts: %s", error)
            return offered
        wanted = ["tcp"] if pool.memfd is None else ["shm", "tcp"]
    unknown = set(wanted) - {*LOCAL, *REMOTE}
    if unknown:
        raise ValueError(f"no such transfer back-end: {', '.join(sorted(unknown))}")
    return Exporters(
        local=[_exporter(name, pool) for name in LOCAL if name in wanted],
        remote=[_exporter(name, pool) for name in REMOTE if name in wanted],
    )


def _exporter(name: str, pool: KvPool) -> Exporter:
    if name == "shm":
        return ShmExporter(pool)
    if name == "cuda-ipc":
        return CudaIpcExporter(pool)
    if name == "nixl":
        nixl = find_nixl()
        if nixl is None:
            raise MissingExtra("nixl", "nixl", "transfer")
        return NixlExporter(nixl, pool)
    return TcpExporter()


def able_backends(pool: KvPool, wanted: Sequence[str] | None) -> list[str]:
    """What a client with this pool can do: `wanted`, or everything that fits its memory."""
    able = ["cuda-ipc" if pool.device != "cpu" else "shm", *REMOTE]
    return able if wanted is None else [name for name in wanted if name in able]


def open_mover(
    name: str, pool: KvPool, about: bytes, fds: list[int], thread: ThreadPoolExecutor
) -> Mover | None:
    """The client's end of a back-end; None for one whose bytes come in band. Raises LinkBroken."""
    if name == "shm":
        return ShmMover(pool, about, fds, thread)
    if name == "cuda-ipc":
        return CudaIpcMover(pool, about, thread)
    if name == "nixl":
        return NixlMover(find_nixl(), pool, about)
    return None

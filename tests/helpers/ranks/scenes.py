"""What ranks do to each other in tests of transports: the processes of `rank_processes` import it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from headrace_kernels.moe.transport import Arrived, Columns, Span, Transport
from headrace_kernels.transport.gloo import Gloo
from headrace_kernels.transport.shared_memory import SharedMemory
from helpers.ranks.processes import Place

DTYPES = (
    torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.uint8,
    torch.float8_e4m3fn, torch.bool,
)  # fmt: skip


@contextmanager
def opened(
    place: Place, kind: str, *, deadline_s: float = 30.0, slice_bytes: int = 8192
) -> Generator[Transport]:
    if kind == "gloo":
        transport = over_gloo(place, deadline_s)
    else:
        transport = SharedMemory.join(
            place.memory,
            rank=place.rank,
            ranks=place.ranks,
            slice_bytes=slice_bytes,
            deadline_s=deadline_s,
        )
    try:
        yield transport
    finally:
        transport.close()


def together(place: Place, what: str) -> None:
    """Returns once all ranks have come here: none of them is late then by more than what it does from here on."""
    (place.folder / f"{what}-{place.rank}").touch()
    while not all((place.folder / f"{what}-{rank}").exists() for rank in range(place.ranks)):
        time.sleep(0.005)


def over_gloo(place: Place, deadline_s: float) -> Gloo:
    """A process group whose store is kept by rank 0, at a port that it tells the others by a file."""
    port = place.folder / "port"
    if place.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        port.with_suffix(".made").write_text(str(store.port))
        port.with_suffix(".made").rename(port)
    else:
        while not port.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, is_master=False)
    return Gloo(store, rank=place.rank, ranks=place.ranks, deadline_s=deadline_s)


def rows_for(sender: int, receiver: int, rows: int, seed: int) -> Columns:
    """A parcel that both sides can make."""
    draw = torch.Generator().manual_seed(seed * 10_000 + sender * 100 + receiver)
    made = []
    for i, dtype in enumerate(DTYPES):
        noise = torch.randint(0, 120, (rows, 3 + i), generator=draw)
        made.append(noise > 60 if dtype == torch.bool else noise.to(dtype))
    return (*made, torch.randint(0, 100, (rows,), generator=draw))  # one without a width


def sent_by(transport: Transport, sizes: list[list[int]], seed: int) -> tuple[Columns, list[Span]]:
    """Columns and parcels of this rank, where `sizes[sender][receiver]` are rows."""
    counts = sizes[transport.rank]
    parcels = [
        rows_for(transport.rank, receiver, rows, seed) for receiver, rows in enumerate(counts)
    ]
    columns = tuple(torch.cat(column) for column in zip(*parcels, strict=True))
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return columns, [Span(*ends[i : i + 2]) for i in range(len(counts))]


def check(transport: Transport, arrived: Arrived, sizes: list[list[int]], seed: int) -> None:
    counts = [row[transport.rank] for row in sizes]
    assert arrived.counts == counts
    due = [rows_for(sender, transport.rank, rows, seed) for sender, rows in enumerate(counts)]
    for got, wanted in zip(arrived.columns, zip(*due, strict=True), strict=True):
        together = torch.cat(wanted)
        assert got.dtype == together.dtype and got.shape == together.shape
        assert torch.equal(got.view(torch.uint8), together.view(torch.uint8))


def swap(transport: Transport, sizes: list[list[int]], seed: int) -> Arrived:
    """One exchange, checked."""
    arrived = transport.post(*sent_by(transport, sizes, seed))()
    check(transport, arrived, sizes, seed)
    return arrived


def random_sizes(ranks: int, most: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, most + 1, (ranks, ranks), generator=draw)
    return (sizes * torch.randint(0, 2, (ranks, ranks), generator=draw)).tolist()  # half are empty


def even(ranks: int, rows: int) -> list[list[int]]:
    return [[rows] * ranks for _ in range(ranks)]

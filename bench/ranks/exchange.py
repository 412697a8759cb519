"""What an exchange between ranks of one host takes: shared memory beside gloo, and the host's part of a layer.

    python -m bench.ranks.exchange --out bench/results/exchange.json

Ranks are processes of one thread each, in one group; ways take turns, in blocks of exchanges, so that a busy machine is
busy for all. In an exchange each rank sends each other rank so many rows of float32, with their slots and weights, as a
layer of experts does on its way out.

shared memory, gloo   the transports of Headrace (`headrace_kernels/transport/`)
plain gloo            one `all_to_all_single` of as many bytes, already packed, whose sizes all ranks know
floor                 copies of as many bytes: into a buffer, and out of it; nobody else is asked

`layer` is a whole layer's exchange by shared memory, there and back, for up to 64 rows that choose 8
of 64 experts at random.
Times are of the slowest rank: of each block the median, of the blocks the median, and the best block.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.helpers import report
from bench.helpers.ranks import Ranks
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Routed
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import Span, Transport
from headrace_kernels.transport.gloo import Gloo
from headrace_kernels.transport.shared_memory import SharedMemory

EXPERTS, TOP_K = 64, 8
HIDDEN = {"smollm2-r1": 576, "R1": 7168}
ROWS = (1, 8, 32, 64, 512)
DECODE_ROWS = 64  # up to which a whole layer is timed
WAYS = ("shared memory", "gloo", "plain gloo", "floor", "layer")
BLOCK_BYTES = 32 << 20  # of a block of exchanges, so that large ones are fewer
LEAST, MOST = 5, 60  # exchanges of a block


def exchange(transport: Transport, columns: tuple[torch.Tensor, ...], rows: int) -> None:
    transport.post(columns, [Span(0, rows)] * transport.ranks)()


def plain_gloo(group: Any, columns: tuple[torch.Tensor, ...], ranks: int) -> Callable[[], None]:
    nbytes = sum(column.nbytes for column in columns) * ranks
    sent, came = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def run() -> None:
        dist.all_to_all_single(came, sent, group=group)

    return run


def floor(columns: tuple[torch.Tensor, ...], ranks: int) -> Callable[[], None]:
    between = [[torch.empty_like(column) for column in columns] for _ in range(ranks)]
    came = [[torch.empty_like(column) for column in columns] for _ in range(ranks)]

    def copy() -> None:
        for there, here in zip(between, came, strict=True):
            for column, part, got in zip(columns, there, here, strict=True):
                part.copy_(column)
                got.copy_(part)

    return copy


def layer(transport: Transport, x: torch.Tensor) -> Callable[[], None]:
    placement = LayerPlacement.even(EXPERTS, transport.ranks)
    dispatch = AllToAll.of(placement, transport, "exact", torch.device("cpu"))
    draw = torch.Generator().manual_seed(transport.rank)
    ids = torch.rand(len(x), EXPERTS, generator=draw).topk(TOP_K).indices.sort(1).values.int()
    routed = Routed(x, ids, torch.ones(len(x), TOP_K))
    here = dispatch.send(routed)
    slots = here.receive().slots
    places = torch.where(slots >= 0, (slots >= 0).flatten().cumsum(0).view(slots.shape) - 1, -1)
    y, places = torch.zeros(int((slots >= 0).sum()), x.shape[1]), places.int()
    here.collect(y, places)

    def there_and_back() -> None:
        sent = dispatch.send(routed)
        sent.receive()
        sent.collect(y, places)

    return there_and_back


def serve(rank: int, ranks: int, store_port: int, memory: Path, pipe: Connection) -> None:
    """One rank: the microseconds of a block of exchanges, again and again."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, None, is_master=False)
    shared = SharedMemory.join(memory, rank=rank, ranks=ranks, deadline_s=60)
    gloo = Gloo(dist.PrefixStore("ours", store), rank=rank, ranks=ranks, deadline_s=60)
    group = dist.ProcessGroupGloo(dist.PrefixStore("plain", store), rank, ranks)
    shared.begin(1)
    gloo.begin(1)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        way, hidden, rows, count = task
        columns = (
            torch.zeros(rows, hidden),
            torch.zeros(rows, TOP_K, dtype=torch.int32),
            torch.zeros(rows, TOP_K),
        )
        match way:
            case "shared memory":
                run = partial(exchange, shared, columns, rows)
            case "gloo":
                run = partial(exchange, gloo, columns, rows)
            case "plain gloo":
                run = plain_gloo(group, columns, ranks)
            case "floor":
                run = floor(columns, ranks)
            case _:
                run = layer(shared, columns[0])
        times: list[float] = []
        for _ in range(count + 2):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e6)
        pipe.send(statistics.median(times[2:]))
    shared.close()
    gloo.close()


def group_of(ranks: int) -> tuple[dist.TCPStore, Ranks]:
    """The store is kept as long as they run."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    memory = Path(f"/dev/shm/headrace-bench-{os.getpid()}-{ranks}")
    return store, Ranks(serve, [(rank, ranks, store.port, memory) for rank in range(ranks)])


def measure(blocks: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for ranks in (2, 4):
        _store, group = group_of(ranks)
        for model, hidden in HIDDEN.items():
            for rows in ROWS:
                nbytes = rows * (hidden + 2 * TOP_K) * 4  # to each rank
                count = min(max(BLOCK_BYTES // (nbytes * ranks), LEAST), MOST)
                ways = WAYS if rows <= DECODE_ROWS else WAYS[:-1]
                took: dict[str, list[float]] = {way: [] for way in ways}
                for number in range(blocks):
                    for way in ways if number % 2 else ways[::-1]:
                        took[way].append(group.block_us(way, hidden, rows, count))
                pairs = zip(took["shared memory"], took["gloo"], strict=True)
                cases.append({
                    "ranks": ranks,
                    "model": model,
                    "hidden": hidden,
                    "rows": rows,
                    "kb_to_each_rank": nbytes / 1e3,
                    "exchanges_of_a_block": count,
                    "median_us": {way: statistics.median(times) for way, times in took.items()},
                    "best_us": {way: min(times) for way, times in took.items()},
                    "gloo_over_shared_memory": statistics.median(b / a for a, b in pairs),
                })  # fmt: skip
                print(cases[-1])
        group.close()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = measure(args.blocks)
    report.write(args.out, report.rounded({"blocks": args.blocks, "cases": cases}))


if __name__ == "__main__":
    main()

"""From how many rows a slot own rows are better computed by themselves, while those of other ranks are on their way.

    python -m bench.ranks.apart --out bench/results/ranks_apart.json

Two ranks, processes of one thread each, run a layer of experts over shared memory, each row with experts drawn at
random. The layers differ in nothing but that number of rows (`ROWS_APART` in `kernels/native/src/moe/parcels.rs`): 0
computes own rows always by themselves, `never` all rows at once. They take turns in blocks of passes, in one order and
then in the other, so that a busy machine is busy for all. Of each block the median pass of the slowest rank counts.

`rows_of_a_slot` is what a slot is asked by the rows of one rank, in the mean: a number above it is as `never`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.helpers import report
from bench.helpers.ranks import Ranks
from headrace import _core
from headrace_kernels.batch import Batch
from headrace_kernels.moe.dispatch import Combine, Routed, Sent
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.native import NativeBackend
from headrace_kernels.ops import Compiled, MlaAttention, MlaStep, Routing, Value
from headrace_kernels.transport.shared_memory import SharedMemory

RANKS, BLOCK_TOKENS = 2, 16
NEVER = 1 << 40
APART = {"0": 0, "4": 4, "8": 8, "16": 16, "32": 32, "64": 64, "never": NEVER}
ROWS = (16, 32, 64, 128, 256)
BLOCK_S = 0.25  # of the passes of one block
LEAST, MOST = 3, 60  # passes of a block
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=BLOCK_TOKENS,
    context_tokens=512, scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of experts in int8."""

    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = {
    "small experts": Shape(hidden=576, width=192, experts=14, top_k=7),
    "many experts": Shape(hidden=1024, width=256, experts=64, top_k=8),
    "large experts": Shape(hidden=2048, width=1024, experts=16, top_k=4),
}


@dataclass(frozen=True, slots=True)
class ByItself:
    """A `NativeDispatch` with a number of its own."""

    exchange: _core.SharedExchange
    combine: Combine = "exact"

    def send(self, routed: Routed) -> Sent:
        raise AssertionError(f"the program exchanges {len(routed.x)} rows by itself")

    def native(self) -> _core.SharedExchange:
        return self.exchange


def batch_of(rows: int) -> Batch:
    """A prompt of so many tokens."""
    numbers = np.arange(rows, dtype=np.int32)
    one = np.full(1, rows, np.int32)
    return Batch(
        tokens=numbers,
        positions=numbers,
        slots=numbers.astype(np.int64),
        seq_starts=np.array([0, rows], np.int32),
        context_lens=one,
        block_tables=np.arange(-(-rows // BLOCK_TOKENS), dtype=np.int32)[None],
        logit_rows=numbers,
        prompt_lens=one,
    )


def layer(
    backend: NativeBackend, shape: Shape, transport: SharedMemory, rows_apart: int
) -> Compiled:
    """A program of one layer. All ranks draw the same weights."""
    draw = torch.Generator().manual_seed(7)

    def noise(*size: int) -> NDArray[np.float32]:
        return (torch.randn(*size, generator=draw) / size[-1] ** 0.5).numpy()

    placement = LayerPlacement.even(shape.experts, RANKS)
    home = placement.replicas_for(transport.rank, torch.device("cpu"))
    exchange = _core.SharedExchange(
        transport._parcels,  # pyright: ignore[reportPrivateUsage]
        owners=home.rank.numpy(),
        slots=home.slot.numpy(),
        partial=False,
        rows_apart=rows_apart,
    )
    held = len(placement.ranks[transport.rank])
    routing = Routing(
        experts=shape.experts, top_k=shape.top_k, groups=1, top_groups=1, normalise=True, scale=1.0
    )
    experts: Any = backend.experts(
        noise(shape.experts, shape.hidden),
        np.zeros(shape.experts, np.float32),
        [noise(2 * shape.width, shape.hidden) for _ in range(held)],
        [noise(shape.hidden, shape.width) for _ in range(held)],
        routing,
        shared=None,
        dispatch=ByItself(exchange),
    )
    tokens = torch.Generator().manual_seed(transport.rank)
    table = backend.table(torch.randn(max(ROWS) + 1, shape.hidden, generator=tokens).numpy())

    def describe(step: MlaStep) -> Value:
        x = step.embed(table)
        return step.wanted_rows(step.moe(x, experts, x))

    return backend.compile(describe)


def serve(rank: int, memory: Path, shape: Shape, pipe: Connection) -> None:
    """One rank: the microseconds of a pass, and of the median one of a block, again and again."""
    torch.set_num_threads(1)
    transport = SharedMemory.join(memory, rank=rank, ranks=RANKS, deadline_s=60)
    backend = NativeBackend(ATTENTION, dtype="int8")
    backend.allocate_kv(max(ROWS) // BLOCK_TOKENS)
    layers = {name: layer(backend, shape, transport, rows) for name, rows in APART.items()}
    transport.begin(1)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        name, rows, count = task
        batch, run = batch_of(rows), layers[name]
        times: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            run(batch)
            times.append((time.perf_counter() - began) * 1e6)
        pipe.send(statistics.median(times))
    transport.close()


def pair_of(shape: Shape) -> Ranks:
    memory = Path(f"/dev/shm/headrace-bench-{os.getpid()}-{shape.hidden}")
    return Ranks(serve, [(rank, memory, shape) for rank in range(RANKS)])


def measure(blocks: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for model, shape in SHAPES.items():
        pair = pair_of(shape)
        for rows in ROWS:
            warm_us = max(pair.block_us(name, rows, 3) for name in APART)
            count = min(max(int(BLOCK_S * 1e6 / warm_us), LEAST), MOST)
            took: dict[str, list[float]] = {name: [] for name in APART}
            for number in range(blocks):
                for name in APART if number % 2 else reversed(APART):
                    took[name].append(pair.block_us(name, rows, count))
            over_never = {
                name: statistics.median(
                    us / never for us, never in zip(times, took["never"], strict=True)
                )
                for name, times in took.items()
            }
            cases.append({
                "model": model,
                "rows_of_a_rank": rows,
                "rows_of_a_slot": rows * shape.top_k / shape.experts,
                "passes_of_a_block": count,
                "median_us": {name: statistics.median(times) for name, times in took.items()},
                "best_us": {name: min(times) for name, times in took.items()},
                "over_never": over_never,
            })  # fmt: skip
            print(cases[-1], flush=True)
        pair.close()
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

"""What moving experts between two ranks takes and gives: passes of some layers before, while and after they move.

    python -m bench.engine.expert_moves --out bench/results/expert_moves.json

Two processes on one machine share 4 layers of 32 experts in int8 by shared memory; rows choose mostly experts of rank
0, which the other one waits for. The ranks gather loads every 20 passes and decide by their own measurements; nothing
is forced. Times are wall-clock times of rank 0. A pass has 64 rows on each rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.helpers import report
from headrace.worker.parallel.rebalance import Rebalancer
from headrace.worker.parallel.rebalanced import RebalanceConfig
from headrace_kernels.batch import Batch
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.balance import GroupShape
from headrace_kernels.moe.dispatch import Dispatch
from headrace_kernels.moe.placed import PlacedDispatch, PlacedLayer
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.native import NativeBackend
from headrace_kernels.ops import MlaAttention, MlaStep, Routing, Value
from headrace_kernels.transport.shared_memory import SharedMemory

RANKS, LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, ROWS = 2, 4, 32, 4, 1024, 512, 64
WINDOW = 20  # passes
HOT = range(8)  # experts that rows prefer, all on rank 0 at first
ROUTING = Routing(experts=EXPERTS, top_k=TOP_K, groups=1, top_groups=1, normalise=True, scale=1.0)
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=ROWS,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip


def noise(*shape: int, seed: int) -> NDArray[np.float32]:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).numpy()


def a_batch() -> Batch:
    rows = np.arange(ROWS, dtype=np.int32)
    return Batch(
        tokens=rows,
        positions=rows,
        slots=rows.astype(np.int64),
        seq_starts=np.array([0, ROWS], np.int32),
        context_lens=np.array([ROWS], np.int32),
        block_tables=np.arange(ROWS // 16, dtype=np.int32)[None],
        logit_rows=rows,
    )


def rank_passes(rank: int, memory: Path, passes: int, moves: bool, out: Any) -> None:
    torch.set_num_threads(1)
    transport = SharedMemory.join(memory, rank=rank, ranks=RANKS)
    backend = NativeBackend(ATTENTION, dtype="int8")
    backend.allocate_kv(ROWS // 16)
    placement = LayerPlacement.even(EXPERTS, RANKS)
    bias = np.array([0.25 if expert in HOT else 0.0 for expert in range(EXPERTS)], np.float32)

    def make(placed: LayerPlacement) -> Dispatch:
        return AllToAll.of(placed, transport, "exact", torch.device("cpu"))

    layers: list[PlacedLayer] = []
    for layer in range(LAYERS):
        held = list(placement.ranks[rank])
        dispatch = PlacedDispatch(placement, make)
        gate_up = [noise(2 * WIDTH, HIDDEN, seed=1000 * layer + e) / HIDDEN**0.5 for e in held]
        down = [noise(HIDDEN, WIDTH, seed=1000 * layer + 500 + e) / WIDTH**0.5 for e in held]
        gate = noise(EXPERTS, HIDDEN, seed=layer) / HIDDEN**0.5
        experts = backend.experts(gate, bias, gate_up, down, ROUTING, dispatch=dispatch)
        layers.append(PlacedLayer(store=backend, experts=experts, dispatch=dispatch))
    table = backend.table(noise(ROWS, HIDDEN, seed=7 + rank))

    def describe(step: MlaStep) -> Value:
        x = step.embed(table)
        for layer in layers:
            x = step.moe(x, layer.experts, x)
        return step.wanted_rows(x)

    run = backend.compile(describe)
    shape = GroupShape(ranks=RANKS, slots=EXPERTS // RANKS)
    rebalancer = Rebalancer(
        transport, layers, RebalanceConfig(shape=shape, rounds_of_window=WINDOW)
    )
    batch = a_batch()
    pass_ms: list[float] = []
    between_ms: list[float] = []
    for number in range(1, passes + 1):
        transport.begin(number)
        start = time.perf_counter()
        if moves and rebalancer.due(number):  # here the same on both ranks: nothing fails
            rebalancer.run()
        middle = time.perf_counter()
        run(batch)
        end = time.perf_counter()
        between_ms.append((middle - start) * 1e3)
        pass_ms.append((end - middle) * 1e3)
    done = rebalancer.done
    out.put((rank, pass_ms, between_ms, {name: getattr(done, name) for name in done.__slots__}))
    transport.close()


def group(passes: int, moves: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """What rank 0 saw."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    memory = Path(f"/dev/shm/headrace-bench-{os.getpid()}-{int(moves)}-{time.monotonic_ns()}")
    ranks = [
        context.Process(target=rank_passes, args=(rank, memory, passes, moves, out))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found = {rank: rest for rank, *rest in (out.get(timeout=500) for _ in ranks)}
    for rank in ranks:
        rank.join()
    pass_ms, between_ms, done = found[0]
    return pass_ms, between_ms, done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", type=int, default=500)
    parser.add_argument(
        "--rounds", type=int, default=3, help="groups with and without moves, in turns"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tail = args.passes // 3  # once all have moved
    for _ in range(args.rounds):
        still_ms, _, _ = group(args.passes, moves=False)
        pass_ms, between_ms, done = group(args.passes, moves=True)
        rows.append(
            {
                "pass_ms_without_moves": statistics.median(still_ms[-tail:]),
                "pass_ms_before": statistics.median(pass_ms[10 : WINDOW * 4]),
                "pass_ms_after": statistics.median(pass_ms[-tail:]),
                "between_ms_all": sum(between_ms),
                "between_ms_most": max(between_ms),
                "all_ms_without_moves": sum(still_ms),
                "all_ms_with_moves": sum(pass_ms) + sum(between_ms),
                **done,
            }
        )
    sizes = {
        "ranks": RANKS,
        "layers": LAYERS,
        "experts": EXPERTS,
        "rows": ROWS,
        "passes": args.passes,
    }
    report.write(args.out, report.rounded({**sizes, "rounds": rows}))


if __name__ == "__main__":
    main()

"""How even placements of experts are, and what making them costs, beside the reference algorithm.

    python -m bench.engine.expert_balance --out bench/results/expert_balance.json

58 layers of 256 experts on 288 slots, as R1 has them. Loads are synthetic: Pareto with the exponent 1.5, where few
experts take most rows, and Zipf with 0.8. The reference is a plain form of the algorithm that deepseek-ai/EPLB
describes, which may put two replicas of an expert on one rank. Imbalance is (greatest - mean) / mean over the ranks of
a layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.helpers import report
from headrace_kernels.moe.balance import GroupShape, Ids, Loads, balanced_slots, imbalance

LAYERS, EXPERTS, GROUPS = 58, 256, 8
SEED = 17
SHAPES = {
    "EP32, hierarchical over 4 nodes": GroupShape(ranks=32, slots=9, nodes=4, expert_groups=GROUPS),
    "EP32, global": GroupShape(ranks=32, slots=9),
    "EP144, global": GroupShape(ranks=144, slots=2),
}


def skews() -> dict[str, Loads]:
    random = np.random.default_rng(SEED)
    zipf = np.arange(1, EXPERTS + 1) ** -0.8
    return {
        "Pareto 1.5": 1 + random.pareto(1.5, (LAYERS, EXPERTS)),
        "Zipf 0.8": random.permuted(np.tile(zipf, (LAYERS, 1)), axis=1),
    }


def heaviest_first(loads: Sequence[float], packs: int) -> list[list[int]]:
    """Items into packs of equally many, each to the lightest that has room."""
    room = len(loads) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        pack = min((p for p in range(packs) if len(found[p]) < room), key=total.__getitem__)
        found[pack].append(item)
        total[pack] += loads[item]
    return found


def reference(loads: Loads, shape: GroupShape) -> Ids:
    """The reference algorithm, layer by layer."""
    return np.array([_reference_layer(layer.tolist(), shape) for layer in loads])


def _reference_layer(loads: list[float], shape: GroupShape) -> list[list[int]]:
    members = len(loads) // shape.expert_groups
    by_group = [
        sum(loads[group * members : (group + 1) * members]) for group in range(shape.expert_groups)
    ]
    ranks: list[list[int]] = []
    for groups in heaviest_first(by_group, shape.nodes):
        here = [group * members + member for group in groups for member in range(members)]
        counts = dict.fromkeys(here, 1)
        replicas = list(here)
        while len(replicas) < shape.ranks * shape.slots // shape.nodes:
            most = max(here, key=lambda expert: loads[expert] / counts[expert])
            counts[most] += 1
            replicas.append(most)
        shares = [loads[expert] / counts[expert] for expert in replicas]
        packs = heaviest_first(shares, shape.ranks // shape.nodes)
        ranks += [[replicas[item] for item in pack] for pack in packs]
    return ranks


def measure(place: Callable[[Loads, GroupShape], Ids], loads: Loads, shape: GroupShape) -> Any:
    start = time.thread_time()
    slots = place(loads, shape)
    took = time.thread_time() - start
    by_layer = imbalance(loads, slots)
    twice = sum(len(set(rank)) < len(rank) for layer in slots.tolist() for rank in layer)
    return {
        "imbalance": float(by_layer.mean()),
        "worst_layer": float(by_layer.max()),
        "ranks_with_an_expert_twice": twice,
        "cpu_s": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS, "slots": 288, "skews": {}}
    for name, loads in skews().items():
        even = np.broadcast_to(np.arange(EXPERTS).reshape(32, -1), (LAYERS, 32, EXPERTS // 32))
        row: dict[str, Any] = {"EP32 without replicas": float(imbalance(loads, even).mean())}
        for shape_name, shape in SHAPES.items():
            row[shape_name] = {
                "ours": measure(balanced_slots, loads, shape),
                "reference": measure(reference, loads, shape),
            }
        figures["skews"][name] = row
    report.write(args.out, report.rounded(figures))


if __name__ == "__main__":
    main()

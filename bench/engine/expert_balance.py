"""How even placements of experts are, what making them costs, and what moving to the next one takes.

    python -m bench.engine.expert_balance --out bench/results/expert_balance.json

Placements: 58 layers of 256 experts on 288 slots, as R1 has them. Synthetic loads: Pareto with the exponent 1.5, where
few experts take most rows, and Zipf with 0.8. Recorded loads (`expert_counts.json`): 29 layers of 32 experts with 32
spare slots on 32 ranks; and, as wide as R1's, 3 layers of 256 that are eight of those each, side by side. The reference
is a plain form of the algorithm that deepseek-ai/EPLB describes, which may put two replicas of an expert on one rank.
Imbalance is (greatest - mean) / mean over the ranks of a layer.

Moves: from the placement for the first half of a text to that for its second half, or for another text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.helpers import report
from headrace_kernels.moe.balance import (
    GroupShape,
    Ids,
    Loads,
    Stay,
    balanced_slots,
    imbalance,
    layer_placements,
)
from headrace_kernels.moe.gate import TOLERANCES
from headrace_kernels.moe.moves import after_wave, busiest, plan_waves

LAYERS, EXPERTS, GROUPS = 58, 256, 8
SEED = 17
SHAPES = {
    "EP32, hierarchical over 4 nodes": GroupShape(ranks=32, slots=9, nodes=4, expert_groups=GROUPS),
    "EP32, global": GroupShape(ranks=32, slots=9),
    "EP144, global": GroupShape(ranks=144, slots=2),
}


RECORDED = report.ROOT / "bench/results/expert_counts.json"
SMALL = {  # of 32 experts, with 32 spare slots and with 112
    "EP32": GroupShape(ranks=32, slots=2),
    "EP144": GroupShape(ranks=144, slots=1),
}


def recorded() -> dict[str, Loads]:
    """Counts of each text, `[windows, layers, experts]`."""
    texts = json.loads(RECORDED.read_text())["counts"]
    return {
        name: np.array([[line.split() for line in window] for window in windows], np.float64)
        for name, windows in texts.items()
    }


def side_by_side(loads: Loads) -> Loads:
    """Layers of 256 experts: eight layers of 32 each, next to each other."""
    layers, experts = loads.shape
    beside = EXPERTS // experts
    return loads[: layers // beside * beside].reshape(-1, EXPERTS)


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


def moved(before: Loads, after: Loads, shape: GroupShape) -> list[dict[str, Any]]:
    """From the placement for `before` to the one for `after`, for each tolerance of the gate."""
    experts = before.shape[1]
    current = balanced_slots(before, shape)
    rows: list[dict[str, Any]] = []
    for tolerance in TOLERANCES:
        start = time.thread_time()
        stay = None if tolerance is None else Stay(slots=current, tolerance=tolerance)
        found = balanced_slots(after, shape, stay)
        placed = time.thread_time() - start
        waves = most = through = 0
        worst = 0.0
        for layer, (one, goal) in enumerate(
            zip(layer_placements(current, experts), found.tolist(), strict=True)
        ):
            placement = one
            plan = plan_waves(placement, goal)
            waves, through = waves + len(plan), through + busiest(plan)
            most += sum(map(len, plan))
            for wave in plan:
                placement = after_wave(placement, wave)
                slots = np.array([placement.ranks])
                worst = max(worst, float(imbalance(after[layer : layer + 1], slots)[0]))
        layers = len(before)
        rows.append(
            {
                "stay_up_to_above_mean": tolerance,
                "imbalance_kept": float(imbalance(after, current).mean()),
                "imbalance": float(imbalance(after, found).mean()),
                "worst_between_waves": worst,
                "moves_a_layer": most / layers,
                "waves_a_layer": waves / layers,
                "experts_through_busiest_rank_a_layer": through / layers,
                "placing_cpu_s": placed,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS, "slots": 288, "skews": {}}
    texts = recorded()
    questions = texts["questions"].sum(0)
    for name, loads in (
        skews() | {"recorded, eight layers side by side": side_by_side(questions)}
    ).items():
        even = np.arange(EXPERTS).reshape(32, -1)
        even = np.broadcast_to(even, (len(loads), *even.shape))
        row: dict[str, Any] = {"EP32 without replicas": float(imbalance(loads, even).mean())}
        row |= compared(loads, SHAPES)
        figures["skews"][name] = row
    even = np.broadcast_to(np.arange(32)[:, None], (len(questions), 32, 1))
    figures["recorded, 32 experts"] = {
        "EP32 without replicas": float(imbalance(questions, even).mean()),
        **compared(questions, SMALL),
    }
    half = len(texts["questions"]) // 2
    first, second = (texts["questions"][part].sum(0) for part in (slice(half), slice(half, None)))
    licence = texts["licence"].sum(0)
    figures["moves"] = {
        f"{name}, {to}": moved(shaped(first), shaped(after), shape)
        for name, shaped, shape in (
            ("256 experts on 32 ranks of 9", side_by_side, SHAPES["EP32, global"]),
            ("32 experts on 32 ranks of 2", np.asarray, SMALL["EP32"]),
        )
        for to, after in (("the same text", second), ("another text", licence))
    }
    report.write(args.out, report.rounded(figures))


def compared(loads: Loads, shapes: dict[str, GroupShape]) -> dict[str, Any]:
    return {
        name: {
            "ours": measure(balanced_slots, loads, shape),
            "reference": measure(reference, loads, shape),
        }
        for name, shape in shapes.items()
    }


if __name__ == "__main__":
    main()

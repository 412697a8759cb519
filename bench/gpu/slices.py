"""Forward passes at the true sizes of DeepSeek-R1's layers, with random weights in FP8.

    python -m bench.gpu.slices layers --out layers.json [--dry] [--budget-s 60]
    python -m bench.gpu.slices rank --out rank.json

`layers`: one dense layer, and as many with all 256 experts as fit into memory. `rank`, one of a group of 32: all 61
layers, with 8 of the 256 experts in each; attention, router and shared expert are whole, as with attention data
parallelism. Its experts get as many rows as in a group (bench/kernels/one_rank.py); what the exchange of rows would
take is a model, and labelled so.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu import communication
from bench.gpu.random_checkpoint import R1_CONFIG, TINY_CONFIG, RandomCheckpoint, layer_bytes
from bench.gpu.steps import Row, decode, prefill, run
from bench.kernels.one_rank import OneRankOf
from bench.kernels.timing import Clock, GpuClock, HostClock
from headrace.models.config import parse_config
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import DeepseekLayer, Share, load_weights
from headrace_kernels.moe.experts import Experts
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import Routing
from headrace_kernels.torch_mla import TRITON, TorchMlaBackend

MEMORY_SHARE = 0.9  # of what is free; the rest is for fragments
# Of a prompt of 8,192 rows, and of experts that are stacked while they are loaded.
ACTIVATION_BYTES = 12 << 30
FEWER = 2  # layers less after the memory did not suffice


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large the two runs are."""

    raw: dict[str, Any]  # config.json of the whole model
    dense_layers: int  # of the slice
    ranks: int
    decodes: Sequence[tuple[int, int]]  # sequences and their context
    prompt: int  # tokens
    block_tokens: int
    dtype: str


FULL = Plan(
    raw=R1_CONFIG,
    dense_layers=1,
    ranks=32,
    decodes=((1, 4096), (32, 4096), (128, 4096)),
    prompt=4096,
    block_tokens=64,
    dtype="bfloat16",
)
DRY = Plan(
    raw=TINY_CONFIG | {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    dense_layers=1,
    ranks=2,
    decodes=((2, 6),),
    prompt=5,
    block_tokens=4,
    dtype="bfloat16",
)


def build(
    raw: dict[str, Any],
    plan: Plan,
    device: torch.device,
    change: Callable[[DeepseekLayer], DeepseekLayer],
    share: Share | None = None,
) -> Deepseek:
    """A model of random weights with room for the largest batch; `change` is told each of its layers."""
    checkpoint = RandomCheckpoint(raw, device)
    config = checkpoint.config
    backend = TorchMlaBackend(
        attention_of(config, plan.block_tokens, mtp=False),
        dtype=plan.dtype,
        device=str(device),
        kernels=TRITON,
    )
    weights = load_weights(checkpoint, backend, fp8=backend, share=share)
    weights = dataclasses.replace(weights, layers=[change(layer) for layer in weights.layers])
    model = Deepseek(config, weights, backend, plan.block_tokens)
    model.allocate_kv(_blocks(plan))
    model.record_steps()  # as workers do
    return model


def _blocks(plan: Plan) -> int:
    contexts = [*plan.decodes, (1, plan.prompt)]
    return max(seqs * -(-context // plan.block_tokens) for seqs, context in contexts)


def step_names(plan: Plan) -> list[str]:
    """In the order in which `steps_of` runs them."""
    decodes = [f"decode, {seqs} sequences, context {context}" for seqs, context in plan.decodes]
    return [*decodes, f"prefill, {plan.prompt} tokens"]


def steps_of(model: Deepseek, plan: Plan, clock: Clock, end_at: float) -> list[Row]:
    """All steps of the plan, or a row that says why there is none."""
    batches = [decode(seqs, context, plan.block_tokens) for seqs, context in plan.decodes]
    batches.append(prefill(plan.prompt, plan.block_tokens))
    rows: list[Row] = []
    for name, batch in zip(step_names(plan), batches, strict=True):
        if time.monotonic() >= end_at:
            rows.append({"step": name, "left_out": "the budget was spent"})
            continue
        try:
            rows.append(run(name, model, batch, clock))
        except torch.OutOfMemoryError as error:
            rows.append({"step": name, "failed": _first_line(error)})
        except Exception as error:
            rows.append({"step": name, "failed": _first_line(error)})
            break  # the device may be of no more use
    return rows


def whole_layers(plan: Plan, clock: Clock, device: torch.device, end_at: float) -> Row:
    """Some layers of the whole model. With too little memory it is tried again with fewer."""
    layers = _fitting(plan, device)
    while True:
        raw = plan.raw | {
            "num_hidden_layers": layers,
            "first_k_dense_replace": min(plan.dense_layers, layers),
        }
        row: Row = {
            "slice": "some layers of the whole model",
            "layers": layers,
            "dense_layers": raw["first_k_dense_replace"],
            "experts": plan.raw["n_routed_experts"],
        }
        try:
            model = build(raw, plan, device, lambda layer: layer)
            return row | {"steps": steps_of(model, plan, clock, end_at)}
        except torch.OutOfMemoryError as error:
            if layers <= plan.dense_layers + 1:
                return row | {"failed": _first_line(error)}
            layers = max(layers - FEWER, plan.dense_layers + 1)
        _forget(device)


def _fitting(plan: Plan, device: torch.device) -> int:
    """Layers whose weights and cache fit into what is free."""
    config = parse_config(plan.raw)
    if device.type != "cuda":
        return config.num_layers
    deepseek = config.deepseek
    assert deepseek is not None
    free = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) - ACTIVATION_BYTES
    free -= 2 * 2 * config.vocab_size * config.hidden_size  # embedding and head
    tokens = _blocks(plan) * plan.block_tokens
    cache = 2 * tokens * (deepseek.kv_lora_rank + deepseek.rope_dim)  # of a layer
    free -= plan.dense_layers * (layer_bytes(config, 0) + cache)
    with_experts = free // (layer_bytes(config, config.num_layers - 1) + cache)
    return plan.dense_layers + max(1, min(with_experts, config.num_layers - plan.dense_layers))


def one_rank(plan: Plan, clock: Clock, device: torch.device, end_at: float) -> Row:
    """All layers, with this rank's share of the experts."""
    raw, ranks = plan.raw, plan.ranks
    experts, top_k = raw["n_routed_experts"], raw["num_experts_per_tok"]
    here = experts // ranks
    layers = range(raw["first_k_dense_replace"], raw["num_hidden_layers"])
    share = Share(
        rank=0,
        layers=dict.fromkeys(layers, LayerPlacement.even(experts, ranks)),
        dispatch=lambda _: OneRankOf(here, top_k),
    )

    def unbiased(layer: DeepseekLayer) -> DeepseekLayer:
        """So that all experts are chosen alike."""
        if layer.experts is None:
            return layer
        mine: Experts = layer.experts
        changed = dataclasses.replace(mine, bias=torch.zeros_like(mine.bias))
        return dataclasses.replace(layer, experts=changed)

    row: Row = {
        "slice": f"one rank of {ranks}",
        "layers": raw["num_hidden_layers"],
        "dense_layers": raw["first_k_dense_replace"],
        "experts": here,
    }
    try:
        model = build(raw, plan, device, unbiased, share)
    except torch.OutOfMemoryError as error:
        return row | {"failed": _first_line(error)}
    steps = steps_of(model, plan, clock, end_at)
    with_experts = raw["num_hidden_layers"] - raw["first_k_dense_replace"]
    routing = Routing(
        experts=experts,
        top_k=top_k,
        groups=raw["n_group"],
        top_groups=raw["topk_group"],
        normalise=raw["norm_topk_prob"],
        scale=raw["routed_scaling_factor"],
    )
    for step in steps:
        if "rows" in step and not clock.dry:
            step["communication"] = communication.modelled(
                routing,
                rows=step["rows"],
                hidden=raw["hidden_size"],
                ranks=ranks,
                layers=with_experts,
            )
    return row | {"steps": steps}


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


PARTS: dict[str, Callable[[Plan, Clock, torch.device, float], Row]] = {
    "layers": whole_layers,
    "rank": one_rank,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without times")
    parser.add_argument("--budget-s", type=float, default=60.0)
    args = parser.parse_args()
    end_at = time.monotonic() + args.budget_s
    device = torch.device("cpu" if args.dry else "cuda")
    clock: Clock = HostClock() if args.dry else GpuClock(device)
    try:
        row = PARTS[args.part](DRY if args.dry else FULL, clock, device, end_at)
    except Exception as error:
        row: Row = {"slice": args.part, "failed": _first_line(error)}
    args.out.write_text(json.dumps(row, indent=1) + "\n")
    steps: list[Row] = row.get("steps", [])
    failed = [one for one in (row, *steps) if "failed" in one]
    for one in failed:
        print(f"failed: {one.get('step') or one['slice']}: {one['failed']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

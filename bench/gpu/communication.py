"""How long the ranks of a group would take to exchange rows: a model from stated rates. Nothing of it is measured.

The bytes are those of the seam (`headrace_kernels/moe/dispatch.py`): random rows choose experts as the model's router
does, `plan_sends` says where they go, and a row has the columns that it has in a window (`one_sided/window.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from headrace_kernels.moe.dispatch import Combine, plan_sends
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.route import route_ref
from headrace_kernels.one_sided.window import WORD, Window
from headrace_kernels.ops import Routing

SAMPLE_ROWS = 512  # that are routed, for the share of rows that goes to other ranks
SEED = 11
LABEL = "modelled, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a rank sends at most in a second, and what an exchange takes however small it is."""

    name: str
    bytes_per_s: float
    latency_us: float
    source: str


# Rates of data sheets; the latencies are guesses.
NETWORKS = (
    Network(
        name="one NVLink domain",
        bytes_per_s=450e9,
        latency_us=20.0,
        source="NVLink 4, data sheet; the latency is a guess",
    ),
    Network(
        name="InfiniBand, 400 Gb/s a GPU",
        bytes_per_s=50e9,
        latency_us=40.0,
        source="ConnectX-7, data sheet; the latency is a guess",
    ),
)


@dataclass(frozen=True, slots=True)
class Sends:
    """Of each row, on average: to how many other ranks it goes, and how many results come back from them."""

    ranks: float
    results: float


@cache
def sends(routing: Routing, ranks: int, combine: Combine) -> Sends:
    """Where rows go that choose experts evenly. Rank 0 stands for all."""
    draw = torch.Generator().manual_seed(SEED)
    logits = torch.randn(SAMPLE_ROWS, routing.experts, generator=draw)
    ids, weights = route_ref(logits, torch.zeros(routing.experts), routing)
    home = LayerPlacement.even(routing.experts, ranks).replicas_for(0, ids.device)
    plan = plan_sends(ids, weights, home, ranks, combine)
    away = (ranks - 1) / ranks / SAMPLE_ROWS
    return Sends(sum(plan.counts) * away, sum(plan.answers) * away)


def exchange_us(
    network: Network, routing: Routing, *, rows: int, hidden: int, ranks: int, combine: Combine
) -> float:
    """Both ways of one layer, in microseconds: rows as e4m3 with their scales out, results in bf16 back."""
    window = Window(
        ranks=ranks,
        most_rows=rows,
        hidden=hidden,
        top_k=routing.top_k,
        combine=combine,
        dtype=torch.bfloat16,
        e4m3=True,
    )
    gone = sends(routing, ranks, combine)
    # Slots, weights, row, column.
    columns = window.x_words + window.scale_words + 2 * routing.top_k + 2
    moved = rows * WORD * (gone.ranks * columns + gone.results * window.result_words)
    return 2 * network.latency_us + moved / network.bytes_per_s * 1e6


def modelled(
    routing: Routing, *, rows: int, hidden: int, ranks: int, layers: int
) -> list[dict[str, Any]]:
    """What an exchange in each of `layers` layers adds to a step, without any overlap."""
    combines: tuple[Combine, ...] = ("exact", "partial")
    return [
        {
            "network": network.name,
            "source": network.source,
            "bytes_per_s": network.bytes_per_s,
            "latency_us": network.latency_us,
            "combine": combine,
            "is": LABEL,
            "step_us": layers
            * exchange_us(network, routing, rows=rows, hidden=hidden, ranks=ranks, combine=combine),
        }
        for network in NETWORKS
        for combine in combines
    ]

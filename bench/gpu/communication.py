"""How long the ranks of a group would take to exchange rows: a model from stated rates. Nothing of it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def exchange_us(network: Network, *, rows: int, top_k: int, hidden: int, ranks: int) -> float:
    """Both ways of one layer, in microseconds: e4m3 rows with their scales out, each expert's result in bf16 back."""
    # A row goes once to each rank that has an expert of it; results come back pair by pair, as `Dispatch` has it.
    reached = ranks * (1 - (1 - 1 / ranks) ** top_k)
    away = (ranks - 1) / ranks
    out = rows * reached * away * (hidden + 4 * -(-hidden // 128))
    back = rows * top_k * away * 2 * hidden
    return 2 * network.latency_us + (out + back) / network.bytes_per_s * 1e6


def modelled(
    *, rows: int, top_k: int, hidden: int, ranks: int, layers: int
) -> list[dict[str, Any]]:
    """What an exchange in each of `layers` layers adds to a step, without any overlap."""
    return [
        {
            "network": network.name,
            "source": network.source,
            "bytes_per_s": network.bytes_per_s,
            "latency_us": network.latency_us,
            "is": LABEL,
            "step_us": layers
            * exchange_us(network, rows=rows, top_k=top_k, hidden=hidden, ranks=ranks),
        }
        for network in NETWORKS
    ]

"""Measured kernel latencies of one layer. `data/README.md` says whose they are."""

from __future__ import annotations

import csv
import functools
import gzip
from collections import defaultdict
from importlib import resources

MeasuredPoint = tuple[float, float, float]
"""`decode`: sequences, context of each, us. `prefill`: prompts, tokens of each, us. `experts`: on a rank, rows, us."""

# How the tables call the types.
_WEIGHTS = {"fp8": "fp8_block", "nvfp4": "nvfp4"}
_KV = {"bf16": "bfloat16", "fp8": "fp8", "": ""}


@functools.cache
def _tables() -> dict[tuple[str, ...], tuple[MeasuredPoint, ...]]:
    packed = resources.files("headrace.planner").joinpath("data/latencies.csv.gz").read_bytes()
    points: defaultdict[tuple[str, ...], list[MeasuredPoint]] = defaultdict(list)
    for row in csv.DictReader(gzip.decompress(packed).decode().splitlines()):
        key = (row["table"], row["system"], row["weights"], row["kv"])
        points[key].append((float(row["x"]), float(row["y"]), float(row["us"])))
    return {key: tuple(of_key) for key, of_key in points.items()}


def measured_points(
    table: str, system: str, weights: str, kv: str = ""
) -> tuple[MeasuredPoint, ...]:
    """Empty where nothing was measured."""
    return _tables().get((table, system, _WEIGHTS[weights], _KV[kv]), ())

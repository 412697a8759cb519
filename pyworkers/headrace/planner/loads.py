"""Recorded loads of experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from headrace.planner.errors import BadLoads
from headrace.planner.model.shape import EXPERTS
from headrace.planner.model.skew import ExpertLoads

MOST_LAYERS = 64
MOST_BYTES = 1 << 22


def read_loads(path: Path) -> ExpertLoads:
    """A JSON list of layers, each a list with the rows of 256 experts. Raises BadLoads."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadLoads(f"{path}: more than {MOST_BYTES} bytes")
        layers: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadLoads(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadLoads(f"{path}: not JSON") from error
    if not isinstance(layers, list) or not 1 <= len(cast(list[Any], layers)) <= MOST_LAYERS:
        raise BadLoads(f"{path}: not a list of 1 to {MOST_LAYERS} layers")
    layers = cast(list[Any], layers)
    return tuple(_shares(path, number, layer) for number, layer in enumerate(layers))


def _shares(path: Path, number: int, layer: Any) -> tuple[float, ...]:
    if not isinstance(layer, list) or len(cast(list[Any], layer)) != EXPERTS:
        raise BadLoads(f"{path}: layer {number} is not a list of {EXPERTS} counts")
    counts = cast(list[Any], layer)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < 1e15:
            raise BadLoads(f"{path}: layer {number}: {count!r} is not a count")
    total = math.fsum(counts)
    if not total:
        raise BadLoads(f"{path}: layer {number} has no rows")
    return tuple(count / total for count in counts)

"""One GPU of a group as a worker of `headrace sim` and `headrace mock`: five costs that are close to its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from headrace.planner.fleet.options import DecodeOption
from headrace.planner.model import shape
from headrace.planner.model.assumptions import LINK_SHARE
from headrace.planner.model.step import decode_step, prefill_step

# What a step of a simulated worker costs: of itself, and for each prompt token, each token that one looks back at, each
# row, and each token of KV that is read. As in bench/presets/derive.py.
FEATURES = ("fixed_ms", "prefill_ms", "context_ms", "row_ms", "kv_ms")
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
ROWS = (1, 4, 16, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384)
BLOCK_TOKENS = 64
SEQUENCES = 1024
BATCHED_TOKENS = 8192


def worker_preset(option: DecodeOption) -> dict[str, Any]:
    """What `--preset FILE` takes. Drafts make the steps longer and each step gives `accepted` tokens."""
    group = option.group
    points = [
        (_features(tokens, 0, 0), prefill_step(group, tokens, tokens).ms) for tokens in PROMPTS
    ]
    points += [
        (_features(0, rows, context), decode_step(group, rows, context).ms)
        for rows, context in itertools.product(ROWS, CONTEXTS)
        if rows * context <= group.kv_tokens
    ]
    cost = best_costs([[part / ms for part in features] for features, ms in points])
    errors = sorted(
        abs(sum(x * part for x, part in zip(cost, features, strict=True)) / ms - 1)
        for features, ms in points
    )
    return {
        "model": "DeepSeek-R1",
        "device": group.gpu.name,
        "configuration": {
            "attention": "data parallel, 128 heads on each GPU",
            "expert_parallel": group.ranks,
            "experts": f"{group.weights}, {group.slots} on each GPU",
            "kv_cache": group.kv,
            "mtp": group.drafts,
        },
        "cost": {name: float(f"{x:.6g}") for name, x in zip(FEATURES, cost, strict=True)},
        "accepted": option.accepted,
        "block_tokens": BLOCK_TOKENS,
        "blocks": group.kv_tokens // BLOCK_TOKENS,
        "sequences": SEQUENCES,
        "batched_tokens": BATCHED_TOKENS,
        "kv_token_bytes": shape.kv_token_bytes(group.kv, drafts=group.drafts > 0),
        "kv_gbps": 8e-9 * LINK_SHARE * group.gpu.network_bytes_per_s,
        "fit": {
            "steps": len(points),
            "median_error": errors[len(points) // 2],
            "worst_error": errors[-1],
        },
        "made_by": "headrace plan",
    }


def _features(prompt: int, rows: int, context: int) -> list[float]:
    return [1.0, prompt, prompt * (prompt - 1) / 2, rows, prompt + rows * context]


def best_costs(rows: Sequence[Sequence[float]]) -> list[float]:
    """The costs from 0 on whose sums over each row come closest to 1: those of the best subset of the columns."""
    columns = len(rows[0])
    best, least = [0.0] * columns, math.inf
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            found = _least_squares([[row[column] for column in chosen] for row in rows])
            if found is None or min(found) < 0:
                continue
            cost = [0.0] * columns
            for column, value in zip(chosen, found, strict=True):
                cost[column] = value
            sums = (sum(x * y for x, y in zip(cost, row, strict=True)) for row in rows)
            error = math.fsum((total - 1) ** 2 for total in sums)
            if error < least:
                best, least = cost, error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solves the normal equations for sums of 1; None where columns depend on each other."""
    size = len(rows[0])
    scale = [math.sqrt(math.fsum(row[i] ** 2 for row in rows)) for i in range(size)]
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) / scale[i] / scale[j] for j in range(size)]
        + [math.fsum(row[i] for row in rows) / scale[i]]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda n: abs(matrix[n][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for n in range(size):
            if n != i:
                share = matrix[n][i] / matrix[i][i]
                matrix[n] = [a - share * b for a, b in zip(matrix[n], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]

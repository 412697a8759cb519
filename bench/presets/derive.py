"""Fit the step costs of the built-in presets to measured kernel latencies.

python -m bench.presets.derive FOLDER        FOLDER has the tables of aiconfigurator named in TABLES
writes h200.json, b200.json and gb200.json beside this file and prints a line for each.

A worker is one GPU of an expert-parallel group with attention data parallelism, and every rank of the group does the
same in a step. A layer is its attention module (projections included) plus its experts; the 3 dense layers count as
expert layers, since their 18,432 intermediate features are 9 experts' worth of arithmetic for each token. A step is

    61 * (context attention of the prompt tokens + generation attention of the rows + experts of both)

to which `fixed + prefill * prompt tokens + context * (tokens they look back at) + row * rows + kv * KV tokens` is
fitted by non-negative least squares of the relative error. Not in the tables and so not in the presets: all-to-all,
shared expert, embedding, sampling, and the gaps between kernels.
"""

import csv
import gzip
import itertools
import json
import sys
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COMMIT = "095f58a5"
TABLES = {
    "context": "trtllm_mla_context_module_deepseek.csv.gz",
    "generation": "trtllm_mla_generation_module_deepseek.csv.gz",
    "experts": "trtllm_wideep_moe_deepseek.csv.gz",
}
LAYERS = 61
FEATURES = ["fixed_ms", "prefill_ms", "context_ms", "row_ms", "kv_ms"]

# Sizes of DeepSeek-R1, in parameters.
EXPERT_PARAMETERS = 58 * 256 * 3 * 7168 * 2048
OTHER_PARAMETERS = 17e9  # attention, dense layers, shared experts, embeddings: on every GPU
EXPERT_SLOTS = 288 / 256  # copies of the experts in demand
LATENT = 512 + 64  # KV values of a token in a layer
BLOCK_TOKENS = 64

BATCHED_TOKENS = 8192
SEQUENCES = 256
PROMPTS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
ROWS = [1, 4, 16, 64, 128, 256]
CONTEXTS = [128, 512, 1024, 2048, 4096, 8192, 16384]
MIXED_PROMPTS = [256, 1024, 4096]
MIXED_ROWS = [16, 64]
MIXED_CONTEXTS = [1024, 4096]

# memory in bytes; 90 % of it is used, and activations and graphs take 4 GB of that
SYSTEMS: dict[str, dict[str, Any]] = {
    "h200": {"system": "h200_sxm", "gemm": "fp8_block", "moe": "fp8_block", "bytes": 141e9},
    "b200": {"system": "b200_sxm", "gemm": "nvfp4", "moe": "nvfp4", "bytes": 180e9},
    "gb200": {"system": "gb200", "gemm": "nvfp4", "moe": "nvfp4", "bytes": 186e9},
}
PARAMETER_BYTES = {"fp8_block": 1.0, "nvfp4": 0.5625}
KV_DTYPE = "fp8"
KV_TOKEN_BYTES = LATENT * LAYERS  # a byte each
KV_GBPS = 400
KV_LINKS = {
    "h200": "ConnectX-7, 400 Gbit/s for each GPU, as in HGX H200 servers",
    "b200": "ConnectX-7, 400 Gbit/s for each GPU, as in DGX B200",
    "gb200": "ConnectX-7, 400 Gbit/s for each GPU, as between NVL72 racks; NVLink within one is 18 times as fast",
}
EP_SIZE = 8
DISTRIBUTION = "power_law_1.01_eplb"

Rows = list[dict[str, str]]
Curve = Callable[[float], float]


def read(folder: Path, name: str) -> Rows:
    with gzip.open(folder / TABLES[name], "rt") as file:
        return list(csv.DictReader(file))


def pick(rows: Rows, **columns: str) -> Rows:
    found = [row for row in rows if all(row[name] == value for name, value in columns.items())]
    if not found:
        raise SystemExit(f"no row with {columns}")
    return found


def curve(points: dict[float, float]) -> Curve:
    """Through the points, straight between them; proportional beyond the last."""
    xs = sorted(points)

    def at(x: float) -> float:
        place = bisect_left(xs, x)
        if place == 0:
            return points[xs[0]]
        if place == len(xs):
            return points[xs[-1]] * x / xs[-1]
        left, right = xs[place - 1], xs[place]
        return points[left] + (points[right] - points[left]) * (x - left) / (right - left)

    return at


class Layer:
    """Measured ms of one layer."""

    def __init__(self, tables: dict[str, Rows], system: dict[str, Any]) -> None:
        dtypes = {"gemm_type": system["gemm"], "kv_cache_dtype": KV_DTYPE, "num_heads": "128"}
        prompt = pick(tables["context"], system=system["system"], batch_size="1", **dtypes)
        self.context = curve({float(row["isl"]): float(row["latency"]) for row in prompt})
        rows = pick(tables["generation"], system=system["system"], **dtypes)
        self.generation = {
            batch: curve({float(r["step"]): float(r["latency"]) for r in of_batch})
            for batch in ROWS
            for of_batch in [pick(rows, batch_size=str(batch))]
        }
        experts = pick(
            tables["experts"],
            system=system["system"],
            moe_dtype=system["moe"],
            moe_ep_size=str(EP_SIZE),
            num_slots="288",
            distribution=DISTRIBUTION,
        )
        self.experts = curve({float(r["num_tokens"]): float(r["latency"]) for r in experts})

    def ms(self, prompt: int, rows: int, context: int) -> float:
        attention = self.context(prompt) if prompt else 0.0
        attention += self.generation[rows](context) if rows else 0.0
        return attention + self.experts(EP_SIZE * (prompt + rows))


def steps(kv_tokens: int) -> list[tuple[int, int, int]]:
    """Prompt tokens, rows, and tokens that each row looks back at."""
    decode = itertools.product([0], ROWS, CONTEXTS)
    mixed = itertools.product(MIXED_PROMPTS, MIXED_ROWS, MIXED_CONTEXTS)
    fits = [step for step in [*decode, *mixed] if step[1] * step[2] <= kv_tokens]
    return [(prompt, 0, 0) for prompt in PROMPTS] + fits


def features(prompt: int, rows: int, context: int) -> list[float]:
    looks_back = prompt * (prompt - 1) / 2
    return [1.0, prompt, looks_back, rows, prompt + rows * context]


def non_negative_least_squares(
    a: np.ndarray[Any, np.dtype[np.float64]], b: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Exact: the best solution is that of some subset of the columns, and five have 31."""
    best, least = np.zeros(a.shape[1]), float("inf")
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            scale = np.linalg.norm(a[:, columns], axis=0)
            x = np.linalg.lstsq(a[:, columns] / scale, b, rcond=None)[0] / scale
            error = float(np.sum((a[:, columns] @ x - b) ** 2))
            if np.all(x >= 0) and error < least:
                best, least = np.zeros(a.shape[1]), error
                best[list(columns)] = x
    return best


def kv_blocks(system: dict[str, Any]) -> int:
    parameter_bytes = PARAMETER_BYTES[system["moe"]]
    weights = EXPERT_PARAMETERS * EXPERT_SLOTS / EP_SIZE * parameter_bytes + OTHER_PARAMETERS
    free = 0.9 * system["bytes"] - weights - 4e9
    return int(free / (KV_TOKEN_BYTES * BLOCK_TOKENS))


def preset(tables: dict[str, Rows], name: str) -> dict[str, Any]:
    system = SYSTEMS[name]
    layer = Layer(tables, system)
    blocks = kv_blocks(system)
    points = steps(blocks * BLOCK_TOKENS)
    ms = np.array([LAYERS * layer.ms(*point) for point in points])
    counts = np.array([features(*point) for point in points])
    cost = non_negative_least_squares(counts / ms[:, None], np.ones(len(ms)))
    errors = np.abs(counts @ cost / ms - 1)
    worst = points[int(np.argmax(errors))]
    return {
        "model": "DeepSeek-R1",
        "device": system["system"],
        "configuration": {
            "attention": "data parallel, 128 heads on each GPU",
            "expert_parallel": EP_SIZE,
            "experts": f"{system['moe']}, 288 slots, load {DISTRIBUTION}",
            "attention_gemm": system["gemm"],
            "kv_cache": KV_DTYPE,
            "mtp": False,
        },
        "cost": {name: float(f"{x:.6g}") for name, x in zip(FEATURES, cost, strict=True)},
        "block_tokens": BLOCK_TOKENS,
        "blocks": blocks,
        "sequences": SEQUENCES,
        "batched_tokens": BATCHED_TOKENS,
        "kv_token_bytes": KV_TOKEN_BYTES,
        "kv_gbps": KV_GBPS,
        "kv_link": KV_LINKS[name],
        "fit": {
            "steps": len(points),
            "median_error": round(float(np.median(errors)), 4),
            "worst_error": round(float(np.max(errors)), 4),
            "worst_step": dict(zip(["prompt", "rows", "context"], worst, strict=True)),
        },
        "assumes": "90 % of memory is used, 4e9 bytes of it for activations and graphs; 17e9 parameters "
        "beside the experts, one byte each; every rank does the same; no all-to-all, shared expert, "
        "sampling or gaps between kernels",
        "source": "ai-dynamo/aiconfigurator, TensorRT-LLM 1.3.0rc20 (attention) and 1.3.0rc10 (experts) tables "
        "under aic-core/src/aiconfigurator_core/systems/data",
        "commit": COMMIT,
        "licence": "Apache-2.0",
        "made_by": "bench/presets/derive.py",
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    tables = {name: read(Path(sys.argv[1]), name) for name in TABLES}
    for name in SYSTEMS:
        made = preset(tables, name)
        path = Path(__file__).parent / f"{name}.json"
        path.write_text(json.dumps(made, indent=2) + "\n")
        cost = np.array([made["cost"][feature] for feature in FEATURES])
        prompt_ms = float(np.dot(features(BATCHED_TOKENS, 0, 0), cost))
        decode_ms = float(np.dot(features(0, 64, 4096), cost))
        print(
            f"{name:6} prefill {BATCHED_TOKENS / prompt_ms * 1e3:7.0f} tokens/s at {BATCHED_TOKENS}, "
            f"decode {decode_ms:5.1f} ms at 64 rows of 4096, {made['blocks']} blocks, "
            f"error {made['fit']['median_error']:.1%} median, {made['fit']['worst_error']:.1%} worst"
        )


if __name__ == "__main__":
    main()

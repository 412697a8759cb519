"""Our forward pass against transformers: same weights, one thread, in turns; then what each dtype costs in quality.

    python -m bench.engine.forward --out bench/results/engine_forward.json

Times are CPU seconds of the one computing thread, the median over rounds; a round measures every case of every
engine once, so that a drifting machine drifts for all. Decode steps have 128 tokens of context. Perplexity is over
questions of GSM8K (gsm8k_questions.txt) in windows of 512 tokens; greedy agreement is the share of positions there
whose most likely token is that of float32.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from bench.helpers.report import write
from headrace.models import Batch, DType, Model, load_model
from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.source import resolve
from headrace_kernels.upload import tensor_of

BLOCK = 16
CONTEXT = 128
WINDOW = 512
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "int8")
CASES = [("decode", 1), ("decode", 8), ("decode", 32), ("prefill", 128), ("prefill", 512)]


def batch_of(seqs: int, rows: int, context: int, tokens: np.ndarray | None = None) -> Batch:
    """`rows` new tokens for each of `seqs` sequences, after `context` tokens; only last rows want logits."""
    blocks = math.ceil((context + rows) / BLOCK)
    tables = np.arange(seqs * blocks, dtype=np.int32).reshape(seqs, blocks)
    positions = np.tile(np.arange(context, context + rows, dtype=np.int32), seqs)
    owner = np.repeat(np.arange(seqs), rows)
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    if tokens is None:
        tokens = np.random.default_rng(7).integers(100, 40_000, seqs * rows)
    return Batch(
        tokens=tokens.astype(np.int32),
        positions=positions,
        slots=slots,
        seq_starts=np.arange(0, seqs * rows + 1, rows, dtype=np.int32),
        context_lens=np.full(seqs, context + rows, np.int32),
        block_tables=tables,
        logit_rows=np.arange(rows - 1, seqs * rows, rows, dtype=np.int32),
    )


def ours(model: Model, case: str, size: int) -> Callable[[], object]:
    seqs, rows, context = (size, 1, CONTEXT) if case == "decode" else (1, size, 0)
    batch = batch_of(seqs, rows, context)
    return lambda: model.forward(batch)


def theirs(model: Any, case: str, size: int) -> Callable[[], object]:
    """One decode step (the cache is cropped back after it) or one prefill."""
    random = torch.Generator().manual_seed(7)
    if case == "prefill":
        ids = torch.randint(100, 40_000, (1, size), generator=random)
        return lambda: model(ids, use_cache=True, logits_to_keep=1)
    prompt = torch.randint(100, 40_000, (size, CONTEXT), generator=random)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    ids = prompt[:, :1]

    def step() -> None:
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-1)

    return step


def cpu_ms(run: Callable[[], object], least_s: float) -> float:
    """CPU milliseconds of one call, over enough calls to fill `least_s`."""
    calls = 0
    start = time.thread_time()
    while calls < 1 or time.thread_time() - start < least_s:
        run()
        calls += 1
    return (time.thread_time() - start) / calls * 1e3


def speed(checkpoint: Checkpoint, models: dict[str, Model], rounds: int) -> list[dict[str, Any]]:
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    runs = {
        (engine, case, size): ours(model, case, size)
        for engine, model in models.items()
        for case, size in CASES
    } | {("transformers", case, size): theirs(oracle, case, size) for case, size in CASES}
    times: dict[tuple[str, str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 1):  # the first round warms up
        for key, run in runs.items():
            times[key].append(cpu_ms(run, 0.15))
    rows: list[dict[str, Any]] = []
    for (engine, case, size), all_ms in times.items():
        ms = statistics.median(all_ms[1:])
        rows.append(
            {
                "engine": engine,
                "case": case,
                "size": size,
                "cpu_ms": round(ms, 3),
                "cpu_ms_per_token": round(ms / size, 3),
                "spread_ms": [round(min(all_ms[1:]), 3), round(max(all_ms[1:]), 3)],
            }
        )
    return rows


def quality(checkpoint: Checkpoint, models: dict[str, Model]) -> list[dict[str, Any]]:
    text = (Path(__file__).parent / "gsm8k_questions.txt").read_text()
    encoder = tokenizers.Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    ids = np.array(encoder.encode(text).ids)
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    exact: list[torch.Tensor] = []
    rows: list[dict[str, Any]] = []
    for name, model in models.items():
        loss = same = 0.0
        for i, window in enumerate(windows):
            batch = batch_of(1, WINDOW, 0, window)
            batch.logit_rows = np.arange(WINDOW, dtype=np.int32)
            logits = tensor_of(model.forward(batch))
            targets = torch.from_numpy(window[1:])
            loss += float(torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum"))
            best = logits.argmax(-1)
            if name == "float32":
                exact.append(best)
            same += float((best == exact[i]).float().mean())
        perplexity = math.exp(loss / (windows.size - len(windows)))
        rows.append(
            {
                "dtype": name,
                "perplexity": round(perplexity, 4),
                "greedy_agreement": round(same / len(windows), 4),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory, GGUF file or name; the default model otherwise")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = resolve(args.model)
    models: dict[str, Model] = {
        dtype: load_model(checkpoint, dtype=dtype, device="cpu", block_tokens=BLOCK)
        for dtype in DTYPES
    }
    for model in models.values():
        model.allocate_kv(512)
    with torch.inference_mode():
        result = {
            "model": checkpoint.name,
            "quality": quality(checkpoint, models),
            "speed": speed(checkpoint, models, args.rounds),
        }
    write(args.out, result)


if __name__ == "__main__":
    main()

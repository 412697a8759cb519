"""The batches of a decode step and of a prompt, and how long a forward pass of them takes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench.kernels.timing import LONG_US, Call, Clock
from headrace.models import Batch, Model
from headrace_kernels.upload import tensor_of

Row = dict[str, Any]
STEPS = 5  # in a row, for the time of a step as the engine runs them


def decode(seqs: int, context: int, block_tokens: int) -> Batch:
    """One more token of each sequence, whose context is then so long."""
    return _batch(seqs, 1, context, block_tokens, prompt_tokens=context - 1)


def prefill(tokens: int, block_tokens: int) -> Batch:
    """A whole prompt."""
    return _batch(1, tokens, tokens, block_tokens, prompt_tokens=tokens)


def _batch(seqs: int, rows: int, context: int, block_tokens: int, *, prompt_tokens: int) -> Batch:
    """The last `rows` tokens of each context, in blocks that are not in order."""
    blocks = -(-context // block_tokens)
    order = np.random.default_rng(1).permutation(seqs * blocks).astype(np.int32)
    tables = order.reshape(seqs, blocks)
    positions = np.tile(np.arange(context - rows, context, dtype=np.int32), seqs)
    owner = np.repeat(np.arange(seqs), rows)
    slots = tables[owner, positions // block_tokens].astype(np.int64) * block_tokens
    return Batch(
        tokens=np.random.default_rng(2).integers(3, 80, seqs * rows).astype(np.int32),
        positions=positions,
        slots=slots + positions % block_tokens,
        seq_starts=np.arange(0, seqs * rows + 1, rows, dtype=np.int32),
        context_lens=np.full(seqs, context, np.int32),
        block_tables=tables,
        logit_rows=np.arange(rows - 1, seqs * rows, rows, dtype=np.int32),
        prompt_lens=np.full(seqs, prompt_tokens, np.int32),
    )


def run(name: str, model: Model, batch: Batch, clock: Clock) -> Row:
    """The row of a forward pass. Raises `ValueError` where logits are not finite."""
    row: Row = {"step": name, "rows": batch.rows, "sequences": batch.seqs}
    row["context"] = int(batch.context_lens.max())
    logits = model.forward(batch)
    if not bool(tensor_of(logits).isfinite().all()):
        raise ValueError(f"{name}: logits are not finite")
    if clock.dry:
        return row | {"dry": True}
    times = clock.time(lambda: model.forward(batch))
    steps = STEPS if times.us < LONG_US else 2
    began = time.perf_counter()
    for _ in range(steps):
        model.forward(batch)
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - began) / steps * 1e6
    return row | {
        "step_us": step_us,
        "gpu_us": times.us,
        "host_us": times.host_us,
        "kernels": by_kernel(lambda: model.forward(batch)),
        "memory_bytes": torch.cuda.max_memory_allocated(),
    }


def by_kernel(call: Call, most: int = 12) -> list[Row] | str:
    """What the profiler counts of one call: the kernels that took longest, and all others together."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        found: Any = profile.key_averages()
        rows: list[Row] = [
            {"name": str(x.key)[:80], "us": float(x.self_device_time_total), "calls": int(x.count)}
            for x in found
            if x.self_device_time_total > 0
        ]
    except Exception as error:
        return f"no profile: {type(error).__name__}: {error}".splitlines()[0]
    rows.sort(key=lambda row: -row["us"])
    rest = rows[most:]
    if rest:
        others: Row = {"name": f"{len(rest)} others", "us": sum(row["us"] for row in rest)}
        rows = [*rows[:most], others | {"calls": sum(row["calls"] for row in rest)}]
    return rows

"""How long the model waits between two passes: with the next step planned while one runs, and without.

    python -m bench.engine.overlap --out bench/results/overlap.json

The model sleeps for each pass; what lies between the end of one pass and the beginning of the next is what the engine
costs a step: sampling, bookkeeping, planning, building the batch. "on a device" is a model whose passes return at once,
one following the other on a device that is made up of times. Both ways take turns. Times are wall times, so other work
on the machine adds to them; medians over all steps of all turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.engine.step_overhead import BLOCK, NoModel, submit
from bench.helpers.report import write
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.wire.frames import Sampling
from headrace.worker.step_executor import StepExecutor
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.ops import Progress, Results
from headrace_kernels.upload import tensor_of

PASS_S = 0.02
STEPS = 60
TURNS = 3


class Sleeper(NoModel):
    """Each pass takes `PASS_S`."""

    def __init__(self) -> None:
        super().__init__(right=True, rows=2048, vocabulary=512)
        self.passes: list[tuple[float, float]] = []

    def _sleep(self) -> None:
        began = time.perf_counter()
        time.sleep(PASS_S)
        self.passes.append((began, time.perf_counter()))

    def forward(self, batch: Batch, progress: Progress | None = None) -> Results:
        self._sleep()
        return super().forward(batch, progress)

    def draft(self, batch: DraftBatch) -> Results:
        self._sleep()
        return super().draft(batch)


class Fence:
    """Passed at a time."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def query(self) -> bool:
        return time.perf_counter() >= self._at_s

    def synchronize(self) -> None:
        time.sleep(max(self._at_s - time.perf_counter(), 0))


class Device(Sleeper):
    """Passes return at once, and take their time one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_on = torch.device("cpu")

    def forward(self, batch: Batch, progress: Progress | None = None) -> Results:
        return tensor_of(super().forward(batch, progress))

    def _sleep(self) -> None:
        before = self.passes[-1][1] if self.passes else 0.0
        began = max(time.perf_counter(), before)
        self.passes.append((began, began + PASS_S))

    def fence(self) -> Fence | None:
        return Fence(self.passes[-1][1]) if self.passes else None


async def drive(engine: Engine, *, overlap: bool, steps: int) -> None:
    """The main loop of a worker that nobody talks to."""
    wake = asyncio.Event()
    with StepExecutor(engine, wake.set, overlap=overlap) as executor:
        while steps > 0 or executor.busy:
            wake.clear()
            if executor.done:
                executor.finish()
                steps -= 1
            elif steps > 0 and executor.prepare_s <= time.perf_counter() and executor.begin():
                continue
            else:
                left_s = executor.prepare_s - time.perf_counter()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), None if left_s == math.inf else left_s)


def gaps_ms(
    model: Sleeper, sequences: int, sampling: Sampling, mtp: int, *, overlap: bool
) -> list[float]:
    """Between passes of steps in which all sequences decode."""
    config = EngineConfig(
        num_blocks=sequences * 2112 // BLOCK,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=max(4 * sequences, 1024),
        mtp=mtp,
        mtp_fixed=True,
    )
    engine = Engine(model, config, KeyedBlockHasher(bytes(32), BLOCK))
    for request in range(sequences):
        engine.submit(submit(request, sampling))
    while engine.waiting_tokens:
        engine.step()
    asyncio.run(drive(engine, overlap=overlap, steps=5))
    del model.passes[:-1]
    asyncio.run(drive(engine, overlap=overlap, steps=STEPS))
    starts = [began for began, _ in model.passes[1:]]
    ends = [ended for _, ended in model.passes[:-1]]
    return [(start - end) * 1e3 for start, end in zip(starts, ends, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "greedy": (Sleeper, Sampling(), 0),
        "greedy, on a device": (Device, Sampling(), 0),
        "sampled": (Sleeper, Sampling(temperature=1.0, top_p=0.9), 0),
        "mtp 1": (Sleeper, Sampling(), 1),
    }
    rows: list[dict[str, Any]] = []
    for sequences in (32, 256):
        for name, (model, sampling, mtp) in cases.items():
            found: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(TURNS):
                for overlap, gaps in found.items():
                    gaps += gaps_ms(model(), sequences, sampling, mtp, overlap=overlap)
            rows.append({"sequences": sequences, "case": name})
            for overlap, gaps in found.items():
                key = "overlap" if overlap else "one_by_one"
                rows[-1][f"{key}_ms"] = round(statistics.median(gaps), 3)
                rows[-1][f"{key}_p90_ms"] = round(statistics.quantiles(gaps, n=10)[-1], 3)
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if args.out:
        write(args.out, {"pass_ms": PASS_S * 1e3, "steps": STEPS, "turns": TURNS, "cases": rows})


if __name__ == "__main__":
    main()

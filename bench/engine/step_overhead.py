"""What a step costs beside the model: plan, batch, sampling, drafts, bookkeeping; the forward pass does nothing.

    python bench/engine/step_overhead.py --out bench/results/step_overhead.json

Times are CPU seconds of the engine's thread: medians over the steps of a run, and the least median of all runs, as
other work on the machine only ever adds. The vocabulary is small, so that reading logits, which grows with it, counts
little; drawing tokens counts in full ("sampled"). Of what is drafted all or nothing is right: the extremes of what a
step may give. The limits are for greedy steps without drafts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine import forward as forward_pass
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.names import KeyedNamer
from headrace.frames import Sampling, Submit
from headrace.models import Batch
from headrace.models.batch import DraftBatch
from headrace_kernels.ops import Fence, KvPool, Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from report import write

BLOCK = 16
VOCAB = 512
PROMPT = 64
STEPS = 150
RUNS = 5
LIMITS_MS = {32: 2.0, 256: 4.0}


class NoModel:
    """Its logits are there before it is asked."""

    config: Any = SimpleNamespace()
    vocab_size = VOCAB
    context_tokens = 4096
    block_tokens = BLOCK
    kv_block_bytes = 1
    kv_layout = "none"
    dtype_name = "none"
    answers_apart = False
    ahead_on: torch.device | None = None
    drafts = True
    draft_token_ids: NDArray[np.int32] | None = None

    def __init__(self, *, right: bool) -> None:
        random = np.random.default_rng(3)
        logits = random.normal(size=(2048, VOCAB)).astype(np.float32)
        logits[:, 7] = 20  # always the most probable token
        self._logits = torch.from_numpy(logits)
        guesses = logits.copy()
        guesses[:, 7 if right else 8] = 30
        self._guesses = torch.from_numpy(guesses)

    def allocate_kv(self, num_blocks: int) -> None:
        del num_blocks

    def kv_pool(self) -> KvPool:
        raise AssertionError("no KV is moved here")

    def forward(self, batch: Batch, progress: Progress | None = None) -> torch.Tensor:
        del progress
        return self._logits[: len(batch.logit_rows)]

    def draft(self, batch: DraftBatch) -> torch.Tensor:
        return self._guesses[: len(batch.logit_rows)]

    def fence(self) -> Fence | None:
        return None


def submit(request: int, sampling: Sampling) -> Submit:
    tokens = np.random.default_rng(request).integers(0, VOCAB, PROMPT).astype("<u4").tobytes()
    return Submit(request, tokens, sampling, [2], 2048)


class Parts:
    """CPU seconds of parts of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._watched: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the time of `owner.method` as that of `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            result = inner(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began
            return result

        setattr(owner, method, timed)
        self._watched.append((owner, method, inner))

    def restore(self) -> None:
        """Nothing is watched any more."""
        for owner, method, inner in self._watched:
            setattr(owner, method, inner)


def measure(sequences: int, sampling: Sampling, mtp: int, *, right: bool) -> dict[str, float]:
    """Median ms of a step in which all sequences decode, and mean ms of its parts."""
    config = EngineConfig(
        num_blocks=sequences * (2048 + PROMPT) // BLOCK,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=max(4 * sequences, 1024),
        mtp=mtp,
        mtp_fixed=True,
    )
    engine = Engine(NoModel(right=right), config, KeyedNamer(bytes(32), BLOCK))
    for request in range(sequences):
        engine.submit(submit(request, sampling))
    while engine.waiting_tokens:
        engine.step()
    for _ in range(5):
        engine.step()
    steps: list[float] = []
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        steps.append(time.thread_time() - began)
    found = {"step_ms": statistics.median(steps) * 1e3}
    parts = Parts()
    forward = engine._forward  # type: ignore[reportPrivateUsage]
    parts.watch(engine.scheduler, "plan", "plan")
    parts.watch(forward_pass, "build", "batch")
    parts.watch(forward._sampler, "sample", "sample")  # type: ignore[reportPrivateUsage]
    if forward.drafter is not None:
        parts.watch(forward.drafter, "follow", "draft")
    for _ in range(50):
        engine.step()
    parts.restore()
    engine.check()
    return found | {f"{name}_ms": 1e3 * s / 50 for name, s in parts.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    greedy, drawn = Sampling(), Sampling(temperature=1.0, top_p=0.9)
    cases = {
        "greedy": (greedy, 0, True),
        "sampled": (drawn, 0, True),
        "mtp 1, all right": (greedy, 1, True),
        "mtp 3, all right": (greedy, 3, True),
        "mtp 3, none right": (greedy, 3, False),
    }
    rows: list[dict[str, Any]] = []
    for sequences, limit in LIMITS_MS.items():
        for name, (sampling, mtp, right) in cases.items():
            runs = [measure(sequences, sampling, mtp, right=right) for _ in range(RUNS)]
            best = min(runs, key=lambda run: run["step_ms"])
            row = {"sequences": sequences, "case": name, "limit_ms": limit}
            rows.append(row | {key: round(value, 3) for key, value in best.items()})
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if args.out:
        write(
            args.out,
            {
                "vocabulary": VOCAB,
                "block_tokens": BLOCK,
                "runs": RUNS,
                "steps": STEPS,
                "cases": rows,
            },
        )


if __name__ == "__main__":
    main()

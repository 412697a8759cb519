"""What a step costs beside the model: plan, batch, sampling, drafts, bookkeeping, frames. The model does nothing.

    make bench-step OUT=bench/results/step_overhead.json

Each of `cases` has a name, how many sequences decode, and `ms`: CPU milliseconds of the engine's thread for one step
and the frames that tell a router of it. They are medians over the steps of a run, and the least median of all runs, as
other work on the machine only ever adds.

What looks at every logit of the vocabulary is done where the logits are, on a GPU by kernels: it is not part of `ms`,
and stands beside it as `logits_ms`, as this machine's processor does it. Of what is drafted all or nothing is right:
the extremes of what a step may give. The limits are for steps without drafts.

Of "prefix-burst", `ms` is the slowest plan while so many requests wait for a prefix of 131,072 tokens that one more of
them computes; `begin_ms` the slowest one that lets some of them begin.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.engine.prefix_burst import WAITING, measure_burst
from bench.helpers.report import write
from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.cache.block_log import BlockLog, CacheView
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.result import StepResult
from headrace.engine.sampling.host_logits import HostLogits
from headrace.engine.step import forward as forward_pass
from headrace.models import Batch
from headrace.models.step_memory import StepMemory
from headrace.wire.codec import encode
from headrace.wire.frames import Sampling, Submit
from headrace.worker.outbox import Outbox
from headrace_kernels.batch import DraftBatch
from headrace_kernels.ops import Fence, KvPool, Progress, Results

BLOCK = 16
VOCAB = 49_152  # of the default model
PROMPT = 64
ANSWER = 1024
RUNS = 3
STEPS = 40  # of a run, and again as many for its parts
LIMITS_MS = {32: 2.0, 256: 0.8, 1024: 3.0}
MOST_DRAFTED = 1024  # in a step: what they are drafted from takes 200 MB
ON_LOGITS = [(HostLogits, name) for name in ("argmax", "race", "highest", "log_total", "take")]


class NoModel:
    """Its logits are there before it is asked, the same for every row."""

    config: Any = SimpleNamespace()
    context_tokens = 4096
    block_tokens = BLOCK
    kv_block_bytes = 1
    kv_layout = "none"
    dtype_name = "none"
    answers_apart = False
    ahead_on: torch.device | None = None
    drafts = True
    draft_token_ids: NDArray[np.int32] | None = None
    pooled_width = 0

    def __init__(self, *, right: bool, rows: int, vocabulary: int = VOCAB) -> None:
        self.vocab_size = vocabulary
        ranks = np.random.default_rng(3).permutation(vocabulary)
        ranks[ranks == 0] = ranks[2]
        ranks[2] = vocabulary  # nobody stops
        ranks[7] = 0  # always the most probable token
        logits = (-2 * np.log1p(ranks)).astype(np.float32)  # as peaked as text, and as long a tail
        self._logits = np.tile(logits, (rows, 1))
        logits[7 if right else 8] = 30
        self._guesses = self._logits if right else np.tile(logits, (rows, 1))

    def record_steps(self) -> None:
        """It has no kernels."""

    def allocate_kv(self, num_blocks: int) -> None:
        del num_blocks

    def step_memory(self, *, rows: int, answers: int, context_tokens: int, mtp: bool) -> StepMemory:
        del rows, answers, context_tokens, mtp
        raise AssertionError("no cache is sized here")

    def kv_pool(self) -> KvPool:
        raise AssertionError("no KV is moved here")

    def forward(self, batch: Batch, progress: Progress | None = None) -> Results:
        del progress
        return self._logits[: len(batch.logit_rows)]

    def draft(self, batch: DraftBatch) -> Results:
        return self._guesses[: len(batch.logit_rows)]

    def pooled(self) -> Results:
        raise AssertionError("no prompt is pooled here")

    def fence(self) -> Fence | None:
        return None


def submit(request: int, sampling: Sampling) -> Submit:
    tokens = np.random.default_rng(request).integers(3, 512, PROMPT).astype("<u4").tobytes()
    return Submit(request, tokens, sampling, [2], ANSWER)


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


class Frames:
    """What a worker does for one router after each step, up to the bytes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._view = CacheView()
        self._outbox = Outbox()
        self._outbox.log = BlockLog(self._view, 1)

    def write(self, result: StepResult) -> None:
        for answers in result.answers.values():
            self._outbox.answer(answers)
        self._outbox.stepped(result)
        log = self._outbox.log
        self._view.apply(self._engine.pool.take_events(), [log] if log else [])
        self._outbox.loaded(self._engine.load, self._engine.waiting_tokens)
        for frame in self._outbox.take():
            encode(frame)


def measure(sequences: int, sampling: Sampling, mtp: int, *, right: bool) -> dict[str, float]:
    """Median ms of a step in which all sequences decode, and mean ms of its parts."""
    config = EngineConfig(
        num_blocks=sequences * (ANSWER + PROMPT) // BLOCK,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=max(4 * sequences, 1024),
        max_waiting=sequences,
        mtp=mtp,
        mtp_fixed=True,
    )
    model = NoModel(right=right, rows=sequences * (1 + mtp))
    engine = Engine(model, config, KeyedBlockHasher(bytes(32), BLOCK))
    frames = Frames(engine)
    for request in range(sequences):
        engine.submit(submit(request, sampling))
    while engine.waiting_tokens:
        frames.write(engine.step())
    logits = Parts()
    for module, name in ON_LOGITS:
        logits.watch(module, name, "logits")
    for _ in range(3):
        frames.write(engine.step())
    steps: list[float] = []
    read: list[float] = []
    for _ in range(STEPS):
        logits.seconds["logits"] = 0
        began = time.thread_time()
        frames.write(engine.step())
        steps.append(time.thread_time() - began - logits.seconds["logits"])
        read.append(logits.seconds["logits"])
    logits.restore()
    found = {"ms": statistics.median(steps) * 1e3, "logits_ms": statistics.median(read) * 1e3}
    parts = Parts()
    parts.watch(engine.scheduler, "plan", "plan")
    parts.watch(forward_pass, "build", "batch")
    parts.watch(engine.steps, "_take_in", "take_in")
    parts.watch(frames, "write", "frames")
    for _ in range(STEPS):
        frames.write(engine.step())
    parts.restore()
    engine.check()
    assert len(engine.stages.running) == sequences, "all decode in all steps"
    return found | {f"{name}_ms": 1e3 * s / STEPS for name, s in parts.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="one of the cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    greedy, drawn = Sampling(), Sampling(temperature=1.0, top_p=0.9)
    cases = {
        "greedy": (greedy, 0, True),
        "drawn": (drawn, 0, True),
        "mtp": (greedy, 1, True),
        "mtp 3, all right": (greedy, 3, True),
        "mtp 3, none right": (greedy, 3, False),
    }
    rows: list[dict[str, Any]] = []

    def add(case: str, sequences: int, limit_ms: float, runs: list[dict[str, float]]) -> None:
        best = min(runs, key=lambda run: run["ms"])
        row = {"case": case, "sequences": sequences, "limit_ms": limit_ms}
        rows.append(row | {key: round(value, 3) for key, value in best.items()})
        print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)

    for sequences, limit in LIMITS_MS.items():
        for name, (sampling, mtp, right) in cases.items():
            if args.only in (None, name) and sequences * mtp <= MOST_DRAFTED:
                runs = [measure(sequences, sampling, mtp, right=right) for _ in range(RUNS)]
                add(name, sequences, limit, runs)
    if args.only in (None, "prefix-burst"):
        model = NoModel(right=True, rows=2 * WAITING)
        model.context_tokens = 1 << 18
        runs = [measure_burst(model) for _ in range(RUNS)]
        add("prefix-burst", WAITING, 1.0, runs)
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

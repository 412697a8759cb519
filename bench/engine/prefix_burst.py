"""What a plan costs while many requests wait for a long prefix that one of them computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.engine.cache.block_hash import KeyedBlockHasher
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.scheduler import Plan
from headrace.models import Model
from headrace.wire.frames import Sampling, Submit

WAITING = 64
PREFIX = 131_072  # tokens
OWN = 64  # tokens of each request behind the prefix
BLOCK = 16
CHUNK = 2048


def measure_burst(model: Model) -> dict[str, float]:
    """CPU ms of the slowest and of the median plan in which all wait, and of the slowest that lets some begin."""
    engine = Engine(
        model,
        EngineConfig(
            num_blocks=(PREFIX + (WAITING + 1) * 4 * OWN) // BLOCK,
            block_tokens=BLOCK,
            max_sequences=2 * WAITING,
            max_batched_tokens=CHUNK,
        ),
        KeyedBlockHasher(bytes(32), BLOCK),
    )
    random = np.random.default_rng(5)
    prefix = random.integers(3, model.vocab_size, PREFIX)
    for request in range(WAITING + 1):
        own = random.integers(3, model.vocab_size, OWN)
        tokens = np.concatenate([prefix, own]).astype("<u4").tobytes()
        engine.submit(Submit(request, tokens, Sampling(), [2], 8))
    waited: list[float] = []
    began: list[float] = []
    plan: Callable[[], Plan] = engine.scheduler.plan

    def timed() -> Plan:
        waiting = len(engine.stages.waiting)
        start = time.thread_time()
        found = plan()
        took = time.thread_time() - start
        if waiting == WAITING == len(engine.stages.waiting):
            waited.append(took)
        elif waiting and waiting <= WAITING:
            began.append(took)
        return found

    scheduler: Any = engine.scheduler
    scheduler.plan = timed
    while not engine.empty:
        engine.step()
    engine.check()
    assert len(waited) >= PREFIX // CHUNK - 2, "they did not wait"
    return {
        "ms": max(waited) * 1e3,
        "median_ms": float(np.median(waited)) * 1e3,
        "begin_ms": max(began) * 1e3,
    }

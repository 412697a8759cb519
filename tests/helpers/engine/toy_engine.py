"""Engines on the model whose logits show every mistake."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from headrace._core import GrammarVocabulary
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from helpers.engine.toy import ToyHasher, ToyModel

BLOCK = 4


def engine_on(
    model: ToyModel,
    *,
    blocks: int = 64,
    sequences: int = 8,
    batched: int = 32,
    clock: Callable[[], float] = time.perf_counter,
    vocabulary: GrammarVocabulary | None = None,
    **more: Any,
) -> Engine:
    """With a cache of so many blocks; `more` is for its `EngineConfig`."""
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=model.block_tokens,
        max_sequences=sequences,
        max_batched_tokens=batched,
        **more,
    )
    hasher = ToyHasher(model.block_tokens)
    return Engine(model, config, hasher, clock=clock, vocabulary=vocabulary)


def make_engine(
    *,
    blocks: int = 64,
    sequences: int = 8,
    batched: int = 32,
    waiting: int = 100,
    prefix_cache: bool = True,
    context: int = 256,
    reads_late: bool = False,
) -> tuple[Engine, ToyModel]:
    model = ToyModel(block_tokens=BLOCK, context_tokens=context)
    model.ahead_on = torch.device("cpu") if reads_late else None
    engine = engine_on(
        model,
        blocks=blocks,
        sequences=sequences,
        batched=batched,
        max_waiting=waiting,
        prefix_cache=prefix_cache,
    )
    return engine, model

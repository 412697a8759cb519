"""An engine on the model whose logits show every mistake."""

from __future__ import annotations

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from helpers.toy import ToyModel, ToyNamer

BLOCK = 4


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
    model.allocate_kv(blocks)
    config = EngineConfig(
        num_blocks=blocks,
        block_tokens=BLOCK,
        max_sequences=sequences,
        max_batched_tokens=batched,
        max_waiting=waiting,
        prefix_cache=prefix_cache,
    )
    return Engine(model, config, ToyNamer(BLOCK)), model

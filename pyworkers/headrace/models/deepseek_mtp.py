"""Where a DeepSeek checkpoint has the layer that drafts, and what is special about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from headrace.models.load.checkpoint import Checkpoint, CheckpointError
from headrace_kernels.ops import HostArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpKeys:
    """Under which names a checkpoint has the layer that drafts."""

    index: int  # of its layer, counting on from the model's
    own: str  # prefix of what only it has
    layer: str  # prefix of the decoder layer in it
    norm: str


_MTP_NAME = re.compile(r"((?:model\.layers|(?:model\.)?mtp\.layers)\.(\d+))\.eh_proj\.weight")


def find_mtp(checkpoint: Checkpoint) -> MtpKeys:
    """The first of them. Raises `CheckpointError` where there is none."""
    layers = checkpoint.config.num_layers
    found: dict[int, str] = {}
    for name in checkpoint.names():
        if match := _MTP_NAME.fullmatch(name):
            own_count = match[1].startswith(("mtp.", "model.mtp."))  # they count from 0
            found[int(match[2]) + (layers if own_count else 0)] = match[1]
    index = min((index for index in found if index >= layers), default=None)
    if index is None:
        raise CheckpointError(
            f"{checkpoint.path}: model.layers.{layers}.eh_proj.weight is missing, and under every later layer too: "
            f"this checkpoint has no layer for multi-token prediction"
        )
    own = found[index]
    nested = f"{own}.mtp_block.input_layernorm.weight" in checkpoint  # as transformers has it
    renamed = f"{own}.post_norm.weight" in checkpoint
    return MtpKeys(
        index=index,
        own=own,
        layer=f"{own}.mtp_block" if nested else own,
        norm=f"{own}.post_norm" if renamed else f"{own}.shared_head.norm",
    )


def draft_token_ids(checkpoint: Checkpoint, own: str) -> HostArray | None:
    """Tokens of a reduced draft head, where the checkpoint has one. Raises `CheckpointError`."""
    config, name = checkpoint.config, f"{own}.draft_token_ids"
    assert config.deepseek is not None
    size, vocab_size = config.deepseek.mtp_draft_vocab_size, config.vocab_size
    if size is None and name in checkpoint:
        raise CheckpointError(
            f"{checkpoint.info(name).file}: {name} is there, but mtp_draft_vocab_size is missing in config.json"
        )
    if size is None:
        return None
    ids = checkpoint.integers(name, (size,))
    different = len(np.unique(ids))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or different < size:
        raise CheckpointError(
            f"{checkpoint.info(name).file}: {name}: expected different token ids from 0 to {vocab_size - 1}, "
            f"found {different} of {size} from {int(ids.min())} to {int(ids.max())}"
        )
    return ids

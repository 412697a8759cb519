"""How much memory the KV cache gets where nobody said, and what happens where there is too little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.host_memory import available_bytes, machine_bytes
from headrace_kernels.torch_if_loaded import out_of_memory, type_of

if TYPE_CHECKING:
    from headrace.models import Model
    from headrace.models.step_memory import StepMemory

SEQUENCE_TOKENS = 512  # that a sequence on a CPU has on average, prompt and answer; a guess
CPU_SHARE = 0.25  # of the memory that is available at start: other workers run beside this one
# Of what is free once weights are loaded and a step has what it needs; the rest is for what the allocator cannot put
# together and for the driver. A guess.
CUDA_SHARE = 0.93


def blocks_wanted(*, context_tokens: int, sequences: int, block_tokens: int, device: str) -> int:
    """Blocks of a cache that nobody said a size for, where the memory does not set a lower limit.

    A GPU is the worker's own: as many as its sequences can ever use. The memory of a CPU is also that of others: room
    for one sequence of the whole context, and for all of them at once with `SEQUENCE_TOKENS` each.
    """
    whole = -(-context_tokens // block_tokens)
    if type_of(device) == "cuda":
        return whole * sequences
    return max(whole, min(whole, -(-SEQUENCE_TOKENS // block_tokens)) * sequences)


def kv_blocks(
    memory_bytes: int | None,
    *,
    block_bytes: int,
    most_blocks: int,
    device: str,
    step: StepMemory,
    sharers: int = 1,
) -> int:
    """Blocks that fit into `memory_bytes`, or into a share of what a step leaves free; never more than `most_blocks`.

    On a CPU `sharers` are the ranks of a group that have the memory of this machine together. Each GPU has one of them.
    Raises `ValueError` where the largest step does not fit, or no block beside it.
    """
    free = _free_bytes(device)
    _check_step(step, free, memory_bytes or 0, device)
    share = CUDA_SHARE if type_of(device) == "cuda" else CPU_SHARE / sharers
    budget = memory_bytes if memory_bytes is not None else int((free - step.total) * share)
    blocks = budget // block_bytes
    if blocks < 1:
        raise ValueError(
            f"{budget} bytes hold no KV block: one takes {block_bytes} bytes; give --kv-memory more"
        )
    return blocks if memory_bytes is not None else min(blocks, most_blocks)


def _check_step(step: StepMemory, free: int, kv_bytes: int, device: str) -> None:
    if step.total + kv_bytes <= free:
        return
    mib = 2**20
    beside = f", beside a KV cache of {kv_bytes / mib:.0f} MiB" if kv_bytes else ""
    change = "--max-batched-tokens, --max-sequences or --context-tokens"
    change += " or --kv-memory" if kv_bytes else ""
    raise ValueError(
        f"the largest step takes {step}{beside}, {device} has {free / mib:.0f} MiB free; give less {change}"
    )


def allocate_kv(model: Model, num_blocks: int, device: str) -> None:
    """Make the cache. Raises `ValueError` when the device has not so much memory: a CPU would kill the worker later."""
    nbytes = num_blocks * model.kv_block_bytes
    wanted = f"a KV cache of {num_blocks} blocks takes {nbytes / 2**30:.1f} GiB"
    if type_of(device) == "cpu" and nbytes > (there := machine_bytes()):
        raise ValueError(
            f"{wanted}, this machine has {there / 2**30:.1f} GiB; give --kv-memory less"
        )
    try:
        model.allocate_kv(num_blocks)
    except (OSError, *out_of_memory()) as error:
        raise ValueError(
            f"{wanted}, which {device} does not have: {error}; give --kv-memory less"
        ) from error


def _free_bytes(device: str) -> int:
    if type_of(device) == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()

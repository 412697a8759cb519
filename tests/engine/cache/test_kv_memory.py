"""How much memory the KV cache gets unasked; too little is said before a worker registers, with both numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headrace.engine.cache import memory
from headrace.engine.cache.memory import (
    SEQUENCE_TOKENS,
    allocate_kv,
    blocks_wanted,
    kv_blocks,
    machine_bytes,
)
from headrace.models.step_memory import StepMemory
from helpers.engine.toy import ToyModel

CPU = "cpu"
NOTHING = StepMemory(lasting=0, attention=0, mlp=0, logits=0)
MIB = 1 << 20


def test_a_gpu_keeps_what_a_step_takes_and_a_part_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = "cuda:1"
    readings = {gpu: (1000, 5000)}  # bytes free and in all
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: readings[device])
    most = partial(kv_blocks, None, device=gpu)
    assert most(block_bytes=10, most_blocks=10_000, step=NOTHING) == 93
    step = StepMemory(lasting=50, attention=250, mlp=200, logits=240)
    assert most(block_bytes=10, most_blocks=10_000, step=step) == 65
    assert most(block_bytes=10, most_blocks=60, step=step) == 60
    asked = kv_blocks(690, block_bytes=10, most_blocks=60, device=gpu, step=step)
    assert asked == 69  # as asked
    with pytest.raises(ValueError, match=r"651 bytes hold no KV block: one takes 652 bytes"):
        most(block_bytes=652, most_blocks=60, step=step)


def test_a_step_that_does_not_fit_is_refused_with_numbers_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = "cuda:0"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB, 5000 * MIB))
    blocks = partial(kv_blocks, block_bytes=MIB, most_blocks=9, device=gpu)
    step = StepMemory(lasting=MIB, attention=600 * MIB, mlp=1100 * MIB, logits=900 * MIB)
    with pytest.raises(
        ValueError,
        match=r"the largest step takes 1101 MiB \(attention 600, mlp 1100, logits 900, lasting 1\), cuda:0 has "
        r"1000 MiB free; give less --max-batched-tokens, --max-sequences or --context-tokens$",
    ):
        blocks(None, step=step)
    step = StepMemory(lasting=0, attention=600 * MIB, mlp=0, logits=0)
    assert blocks(400 * MIB, step=step) == 400
    with pytest.raises(
        ValueError,
        match=r"takes 600 MiB .* beside a KV cache of 401 MiB, cuda:0 has 1000 MiB free; .* or --kv-memory$",
    ):
        blocks(401 * MIB, step=step)


def test_a_cpu_keeps_memory_for_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    blocks = partial(kv_blocks, None, block_bytes=10, most_blocks=10_000, device=CPU)
    assert blocks(step=NOTHING) == 25
    assert blocks(step=StepMemory(lasting=200, attention=0, mlp=0, logits=0)) == 20
    with pytest.raises(ValueError, match="cpu has 0 MiB free"):
        blocks(step=StepMemory(lasting=1001, attention=0, mlp=0, logits=0))


def test_unasked_a_cpu_has_room_for_a_whole_context_and_for_all_sequences_of_a_common_length() -> (
    None
):
    wanted = partial(blocks_wanted, block_tokens=16)
    common = SEQUENCE_TOKENS // 16
    assert wanted(context_tokens=8192, sequences=64, device="cpu") == 64 * common
    assert wanted(context_tokens=8192, sequences=2, device="cpu") == 512
    assert wanted(context_tokens=8193, sequences=2, device="cpu") == 513
    assert wanted(context_tokens=100, sequences=3, device="cpu") == 3 * 7
    assert wanted(context_tokens=8192, sequences=64, device="cuda:1") == 64 * 512


def test_a_budget_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"99 bytes hold no KV block: one takes 100 bytes"):
        kv_blocks(99, block_bytes=100, most_blocks=5, device=CPU, step=NOTHING)


def test_more_than_the_machine_has_is_refused() -> None:
    model = ToyModel()
    blocks = machine_bytes() // model.kv_block_bytes + 1
    with pytest.raises(ValueError, match=rf"KV cache of {blocks} blocks takes .* this machine has"):
        allocate_kv(model, blocks, CPU)
    allocate_kv(model, 3, CPU)
    assert model.kv_pool().num_blocks == 3


@pytest.mark.parametrize(
    "error", [OSError("Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_what_a_device_does_not_give_is_named(error: Exception) -> None:
    class Full(ToyModel):
        def allocate_kv(self, num_blocks: int) -> None:
            if num_blocks > 1:
                raise error

    with pytest.raises(ValueError, match=r"2 blocks takes .* which cuda:0 does not have: .*memory"):
        allocate_kv(Full(), 2, "cuda:0")

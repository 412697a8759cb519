"""How much memory the KV cache gets unasked; too little is said before a worker registers, with both numbers."""

from __future__ import annotations

import pytest
import torch

from headrace.engine import memory
from headrace.engine.memory import allocate_kv, kv_blocks, machine_bytes
from helpers.toy import ToyModel

CPU = torch.device("cpu")


def test_a_gpu_keeps_a_part_of_what_is_free_for_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda:1")
    readings = {gpu: (1000, 5000)}  # bytes free and in all
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: readings[device])
    assert kv_blocks(None, block_bytes=10, most_blocks=10_000, device=gpu) == 85
    assert kv_blocks(None, block_bytes=10, most_blocks=60, device=gpu) == 60
    assert kv_blocks(990, block_bytes=10, most_blocks=60, device=gpu) == 99  # as asked
    with pytest.raises(ValueError, match=r"850 bytes hold no KV block: one takes 851 bytes"):
        kv_blocks(None, block_bytes=851, most_blocks=60, device=gpu)


def test_a_cpu_keeps_memory_for_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert kv_blocks(None, block_bytes=10, most_blocks=10_000, device=CPU) == 25


def test_a_budget_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"99 bytes hold no KV block: one takes 100 bytes"):
        kv_blocks(99, block_bytes=100, most_blocks=5, device=CPU)


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
        allocate_kv(Full(), 2, torch.device("cuda:0"))

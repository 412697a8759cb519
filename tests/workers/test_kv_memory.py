"""Too little memory for the KV cache is said before a worker registers, with both numbers."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.memory import allocate_kv, kv_blocks, machine_bytes
from helpers.toy import ToyModel

CPU = torch.device("cpu")


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

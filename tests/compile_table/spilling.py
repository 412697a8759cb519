"""A kernel that must spill: it prints its own row of the table, as measure.py would."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

from compile_table.launches import launches
from compile_table.measure import measured, row


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803 - Triton's parameters
    """A warp keeps a product of matrices in the registers that `maxnreg` leaves it."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))


def main() -> None:
    def step() -> None:
        x = torch.empty(64, 64, dtype=torch.bfloat16)
        kernel: Any = _spilling_kernel[(1,)]
        kernel(x, torch.empty(64, 64), SIZE=64, num_warps=1, maxnreg=32)

    found = launches(step, 90)
    resources = measured(found, {})
    print(json.dumps([row(launch, [], resources[key]) for key, launch in found.items()]))


if __name__ == "__main__":
    main()

"""Arrays on their way to torch: those of a step without the host waiting, and the weights of a checkpoint."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

# As a checkpoint gives them, or as what computes with torch already has them.
Weights: TypeAlias = "NDArray[Any] | torch.Tensor"

# What numpy has from ml_dtypes and torch does not take from it: the integers of as many bits.
_BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`; on a CPU it is not copied.

    From pageable memory torch would wait for all that the device has to do before; pinned memory is kept by torch until
    the copy is done.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def tensor_of(weights: Weights) -> torch.Tensor:
    """The same memory, on the CPU where it is an array."""
    if isinstance(weights, torch.Tensor):
        return weights
    name = weights.dtype.name
    if name not in _BITS:
        return torch.from_numpy(weights)
    return torch.from_numpy(weights.view(_BITS[name])).view(getattr(torch, name))

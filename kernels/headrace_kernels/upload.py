"""Arrays of a step on their way to the device, without the host waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`; on a CPU it is not copied.

    From pageable memory torch would wait for all that the device has to do before; pinned memory is kept by torch until
    the copy is done.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)

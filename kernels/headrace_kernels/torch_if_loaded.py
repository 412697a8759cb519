"""What callers of both kinds of backends need of torch, without importing it: a worker on a CPU runs without.

Where torch was not imported nothing can be a tensor, and nothing can run on a device.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext


def type_of(device: str) -> str:
    """ "cpu" or "cuda": a device without its number."""
    return device.partition(":")[0]


def inference_mode() -> AbstractContextManager[object]:
    """Passes and what is made of their results: torch keeps nothing for gradients meanwhile."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.inference_mode()


def out_of_memory() -> tuple[type[Exception], ...]:
    """What is raised where a device, or the host, has no memory for something."""
    torch = sys.modules.get("torch")
    return (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)

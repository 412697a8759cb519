"""Where a worker computes: what `--device` names if this machine has it, otherwise what there is."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

from headrace.errors import NoDevice
from headrace.extras import needs

DRIVER = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")
INSTEAD = "or compute on the CPU with --device cpu"


def choose_device(named: str) -> str:
    """`named`, or for "auto" what is there. Raises `NoDevice` for CUDA where torch cannot reach a GPU.

    Raises `MissingExtra` where there seems to be a GPU and no torch: a GPU is not left idle unasked.

    torch is imported only where a GPU is possible: `serve` calls this before it starts anything.
    """
    if named == "cpu" or (named == "auto" and not (_has_driver() or AMD_DRIVER.exists())):
        return "cpu"
    with needs("worker", _why(named)):
        import torch

    if named == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings(record=True) as said:  # torch says there why a driver is no use
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if not works:
        raise NoDevice(f"--device {named}: {_lacks([str(one.message) for one in said])}")
    return named


def _why(named: str) -> str:
    """What torch is wanted for."""
    if named != "auto":
        return f"--device {named}"
    return "this machine has a driver for GPUs (--device cpu leaves them alone)"


def load_torch(what_for: str) -> None:
    """Raises `MissingExtra`."""
    with needs("worker", what_for):
        import torch
    torch.set_num_threads(1)  # more, and the workers of a machine fight for its cores


def _lacks(said: list[str]) -> str:
    """What is missing for CUDA, and what to do. One line."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        build = f"this torch ({torch.__version__}) is built without CUDA"
        return f"{build}; install a build with CUDA (https://pytorch.org/get-started/locally/), {INSTEAD}"
    if torch.version.hip is None and not _has_driver():
        return f"no NVIDIA driver is on this machine ({DRIVER} cannot be loaded); install one, {INSTEAD}"
    if said:
        return f"{' '.join(said[0].split())}; {INSTEAD}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"the driver shows no GPU{hidden}; see what nvidia-smi lists, {INSTEAD}"


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True

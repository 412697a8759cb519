"""Which Triton kernels a call launches, and which ones the package has: none may be without a case."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import KernelInterface

import headrace_kernels

# They write to other ranks' memory: what one GPU would time is not what they cost.
OF_SEVERAL_GPUS = "headrace_kernels.one_sided"


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def kernels_of_the_package(*, one_gpu: bool = False) -> set[str]:
    """What is launched: the functions of Triton that no other one calls. With `one_gpu` those that one GPU can time."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(headrace_kernels.__path__, "headrace_kernels."):
        if one_gpu and module.name.startswith(OF_SEVERAL_GPUS):
            continue
        for member in vars(importlib.import_module(module.name)).values():
            if isinstance(member, KernelInterface):
                found[name_of(member)] = member
    called = {name for kernel in found.values() for name in kernel.fn.__code__.co_names}
    return {name for name in found if name.rpartition(".")[2] not in called}


@contextmanager
def recorded() -> Generator[set[str]]:
    """The names of the kernels that are launched until the block ends."""
    names: set[str] = set()
    interface: Any = KernelInterface
    launch_of = interface.__getitem__

    def record(kernel: Any, grid: Any) -> Callable[..., Any]:
        names.add(name_of(kernel))
        return launch_of(kernel, grid)

    interface.__getitem__ = record
    try:
        yield names
    finally:
        interface.__getitem__ = launch_of

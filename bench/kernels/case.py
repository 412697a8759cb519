"""What is measured: one call of a kernel's wrapper, as the engine makes it, at one shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Peak = Literal["bf16", "fp8", "fp32"]  # the matrix product whose rate is the ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A case with its tensors on a device."""

    ours: Callable[[], object]
    theirs: Callable[[], object]  # what a user of torch would call for the same result
    theirs_is: str
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # a result of ours, and of the reference
    nbytes: int  # by the kernel's own `bytes()`
    flops: int = 0  # by its own `flops()`
    limit: float = 1e-2  # of the error, |found - expected| / |expected|: that of bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    wrapper: str
    model: str
    point: str
    build: Callable[[Bench], Work]
    peak: Peak = "bf16"
    published: str | None = None  # a row of published.json

    @property
    def name(self) -> str:
        return f"{self.wrapper} | {self.model} | {self.point}"


@dataclass(slots=True)
class Bench:
    """Where tensors are made. The same seed gives the same tensors."""

    device: torch.device
    seed: int = 0

    def draw(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> torch.Tensor:
        """Normal values. e4m3 cannot be drawn, so it is rounded from bfloat16."""
        self.seed += 1
        random = torch.Generator(self.device).manual_seed(self.seed)
        drawn = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        x = torch.randn(*shape, generator=random, device=self.device, dtype=drawn)
        return (x if scale == 1.0 else x.mul_(scale)).to(dtype)

    def integers(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def range(self, end: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.arange(end, dtype=dtype, device=self.device)

    def shuffled(self, count: int) -> torch.Tensor:
        """A permutation of the numbers below `count`, int32: blocks of a cache are not in order."""
        self.seed += 1
        random = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randperm(count, generator=random, device=self.device).int()


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; NaN where either is not finite."""
    found, expected = found.float(), expected.float()
    size = torch.linalg.vector_norm(expected).item()
    difference = torch.linalg.vector_norm(found - expected).item()
    return difference / size if size else difference

"""What this device reaches at most, by torch's own calls: the ceilings that kernels are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.timing import Clock

COPY_BYTES = 1 << 31
SIDE = 8192  # of the square matrices
SIDE_FP32 = 4096
DRY_SIDE = 64

Row = dict[str, Any]


def measure(clock: Clock, device: torch.device) -> list[Row]:
    """One row each; one that fails says why and has no rate."""
    return [
        _row(name, unit, clock, make, device)
        for name, unit, make in (
            ("copy", "bytes", _copy),
            ("bf16", "flops", _bf16),
            ("fp8", "flops", _fp8),
            ("fp32", "flops", _fp32),
        )
    ]


# Makes a call, and says how much of the unit it does.
Make = Callable[[torch.device, bool], tuple[Callable[[], object], int]]


def _row(name: str, unit: str, clock: Clock, make: Make, device: torch.device) -> Row:
    row: Row = {"ceiling": name, "what": make.__doc__}
    try:
        call, amount = make(device, clock.dry)
        times = clock.time(call)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if clock.dry:
        return row | {"dry": True, unit: amount}
    return row | {unit: amount, "us": times.us, f"{unit}_per_s": amount / times.us * 1e6}


def _copy(device: torch.device, dry: bool) -> tuple[Callable[[], object], int]:
    """copy_ of 2 GiB, bytes read and written"""
    count = DRY_SIDE if dry else COPY_BYTES
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * count


def _square(device: torch.device, side: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(side, side, device=device).to(dtype) for _ in range(2)]


def _bf16(device: torch.device, dry: bool) -> tuple[Callable[[], object], int]:
    """matmul of two 8192 x 8192 matrices of normal values"""
    side = DRY_SIDE if dry else SIDE
    a, b = _square(device, side, torch.bfloat16)
    return lambda: a @ b, 2 * side**3


def _fp8(device: torch.device, dry: bool) -> tuple[Callable[[], object], int]:
    """_scaled_mm of two e4m3 8192 x 8192 matrices, one scale each, to bf16"""
    side = DRY_SIDE if dry else SIDE
    a, b = _square(device, side, torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled: Any = torch._scaled_mm  # pyright: ignore[reportPrivateUsage]

    def call() -> object:
        return scaled(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return call, 2 * side**3


def _fp32(device: torch.device, dry: bool) -> tuple[Callable[[], object], int]:
    """matmul of two 4096 x 4096 matrices of normal values, without tf32"""
    side = DRY_SIDE if dry else SIDE_FP32
    a, b = _square(device, side, torch.float32)
    return lambda: a @ b, 2 * side**3

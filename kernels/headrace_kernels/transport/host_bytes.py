"""Columns as bytes that a library without tensors can read and write."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_kernels.moe.transport import Columns


def row_bytes(column: torch.Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def on_host(columns: Columns) -> Columns:
    """The columns themselves where they are on the CPU."""
    return tuple(column.cpu() for column in columns)


def as_bytes(column: torch.Tensor) -> NDArray[np.uint8]:
    """The memory of a column of the CPU, or of a copy where its rows do not lie side by side."""
    return column.contiguous().view(torch.uint8).numpy()  # numpy lacks some dtypes


def empty_rows(columns: Columns, rows: int) -> Columns:
    """Room on the CPU for rows like those of `columns`."""
    return tuple(column.new_empty((rows, *column.shape[1:]), device="cpu") for column in columns)


def back_to(columns: Columns, like: Columns) -> Columns:
    """The columns on the device of those that were sent."""
    return tuple(
        column.to(sent.device, non_blocking=True)
        for column, sent in zip(columns, like, strict=True)
    )

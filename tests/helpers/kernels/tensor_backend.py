"""The native backend for tests whose weights and oracles are tensors: these go in, and come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.lazy import Lazy
from headrace_kernels.native import NativeBackend
from headrace_kernels.ops import Progress
from headrace_kernels.upload import tensor_of


def array_of(weights: Any) -> NDArray[Any]:
    """The same memory as numpy has it, if it is a tensor."""
    if not isinstance(weights, torch.Tensor):
        return weights
    if weights.dtype == torch.bfloat16:
        return weights.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return weights.numpy()


class TensorBackend(NativeBackend):
    """Also takes what numpy has, as checkpoints give it."""

    def matrix(self, parts: Sequence[Any], bias: Any = None) -> Any:
        return super().matrix(
            [array_of(part) for part in parts], None if bias is None else array_of(bias)
        )

    def head_matrices(self, kv_b: Any) -> Any:
        return super().head_matrices(array_of(kv_b))

    def experts(
        self, gate: Any, bias: Any, gate_up: Sequence[Any], down: Sequence[Any], *rest: Any, **named: Any
    ) -> Any:  # fmt: skip
        first, second = (
            Lazy(range(len(half)), lambda i, half=half: array_of(half[i]))
            for half in (gate_up, down)
        )
        return super().experts(array_of(gate), array_of(bias), first, second, *rest, **named)

    def overwrite_expert(self, experts: Any, slot: int, gate_up: Any, down: Any) -> None:
        super().overwrite_expert(experts, slot, array_of(gate_up), array_of(down))

    def vector(self, x: Any) -> list[float]:
        return super().vector(array_of(x))

    def table(self, x: Any) -> Any:
        return super().table(array_of(x))

    @property
    def pooled(self) -> Any:
        return tensor_of(super().pooled)

    def compile(self, describe: Callable[[Any], Any]) -> Any:
        run = super().compile(describe)

        def tensors(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
            return tensor_of(run(batch, progress))

        return tensors

    def compile_draft(self, describe: Callable[[Any], Any]) -> Any:
        run = super().compile_draft(describe)

        def tensors(batch: DraftBatch) -> torch.Tensor:
            return tensor_of(run(batch))

        return tensors


def floats_of(results: torch.Tensor | NDArray[np.float32]) -> torch.Tensor:
    """What a pass computed, as the caller's own."""
    return tensor_of(results).clone()

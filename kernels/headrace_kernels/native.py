"""The CPU backend: Rust kernels on one thread, with one fixed order of arithmetic for every element.

A description is recorded once; then a step is one call with the GIL released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import _core
from headrace_kernels.ops import (
    LAYERS_PER_GROUP,
    Attention,
    Compiled,
    KvPool,
    KvRegion,
    Progress,
    Step,
    layer_groups,
)
from headrace_kernels.pool_memory import PoolMemory

if TYPE_CHECKING:
    from headrace.models.batch import Batch

STORED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class NativeBackend:
    """Weights as `dtype` ("float32", "bfloat16", "float16", "int8"); arithmetic and cache are float32.

    `simd` forces an instruction set, for tests. Raises ValueError when `block_tokens` is not a multiple of 16.
    """

    def __init__(self, attention: Attention, *, dtype: str, simd: str | None = None) -> None:
        self._attention = attention
        self._simd = simd
        self.dtype_name = dtype
        self.kv_block_bytes = self._program().block_bytes
        a = attention
        self.kv_layout = (
            f"native-1 float32 layers={a.layers} kv_heads={a.kv_heads} head_dim={a.head_dim} "
            f"block_tokens={a.block_tokens} layers_per_group={LAYERS_PER_GROUP}"
        )
        self._memory: PoolMemory | None = None
        self._kv: NDArray[np.float32] | None = None

    def _program(self) -> _core.Program:
        a = self._attention
        return _core.Program(
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            layers=a.layers,
            block_tokens=a.block_tokens,
            scale=a.scale,
            inv_freq=list(a.inv_freq),
            rope_scale=a.rope_scale,
            simd=self._simd,
        )

    def matrix(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None
    ) -> _core.Weight:
        stored = STORED.get(parts[0].dtype, "float32")
        if any(STORED.get(part.dtype, "float32") != stored for part in parts):
            stored = "float32"
        arrays = [_array(part, stored) for part in parts]
        return _core.Weight(
            arrays, stored, self.dtype_name, None if bias is None else bias.float().tolist()
        )

    def vector(self, x: torch.Tensor) -> list[float]:
        return x.float().tolist()

    def table(self, x: torch.Tensor) -> _core.Table:
        stored = STORED.get(x.dtype, "float32")
        return _core.Table(_array(x, stored), stored)

    def allocate_kv(self, num_blocks: int) -> None:
        self._kv = self._memory = None  # so that old and new never exist together
        self._memory = PoolMemory(num_blocks * self.kv_block_bytes)
        self._kv = np.frombuffer(self._memory.view, np.float32)

    def kv_pool(self) -> KvPool:
        assert self._memory is not None, "allocate_kv comes first"
        layer_bytes = self.kv_block_bytes // self._attention.layers
        groups = [
            [
                KvRegion(
                    memory=self._memory.view,
                    stride=self.kv_block_bytes,
                    offset=layers.start * layer_bytes,
                    nbytes=len(layers) * layer_bytes,
                )
            ]
            for layers in layer_groups(self._attention.layers)
        ]
        return KvPool(
            num_blocks=self._memory.view.nbytes // self.kv_block_bytes,
            block_bytes=self.kv_block_bytes,
            groups=groups,
            device="cpu",
            memfd=self._memory.memfd,
        )

    def fence(self) -> None:
        """A step is done when it returns."""

    def compile(self, describe: Callable[[Step], Any]) -> Compiled:
        program = self._program()
        describe(program)  # its methods are the operations of `Step`
        program.finish()
        width = program.out_width
        out = np.empty((0, width), np.float32)

        def run(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
            nonlocal out
            assert self._kv is not None, "allocate_kv comes first"
            wanted = len(batch.logit_rows)
            if wanted > len(out):
                out = np.empty((wanted, width), np.float32)
            step = partial(
                program.run,
                tokens=batch.tokens,
                positions=batch.positions,
                slots=batch.slots,
                seq_starts=batch.seq_starts,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                logit_rows=batch.logit_rows,
                kv=self._kv,
                out=out[:wanted],
            )
            if progress is None:
                step()
            else:
                step(progress=progress, layers_per_group=LAYERS_PER_GROUP)
            return torch.from_numpy(out[:wanted])

        return run


def _array(x: torch.Tensor, stored: str) -> NDArray[Any]:
    if stored == "float32":
        return x.float().contiguous().numpy()
    return x.contiguous().view(torch.uint16).numpy()

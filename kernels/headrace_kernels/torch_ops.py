"""The torch backend: Triton kernels on a GPU, or their torch references as the oracle of tests.

Nothing chooses the references by itself: they are slow, and torch's sums depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace_kernels.attention import paged_attention, rope
from headrace_kernels.dense import linear, rms_norm, silu_mul
from headrace_kernels.ops import (
    LAYERS_PER_GROUP,
    Attention,
    Compiled,
    Fence,
    ForwardPass,
    KvPool,
    KvRegion,
    MlaAttention,
    Progress,
    StepKind,
    layer_groups,
)
from headrace_kernels.recordings import Form, Recordings
from headrace_kernels.upload import Weights, tensor_of, upload

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch

TABLE_BLOCKS = 16  # by which the block tables of steps that may be recorded become wider


@dataclass(frozen=True, slots=True)
class Kernels:
    """The five functions that come in two kinds."""

    rms_norm: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    rope_and_store_kv: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]


def _reference_attention(
    *args: torch.Tensor,
    scale: float,
    plan: object,  # noqa: ARG001 - only the kernel needs it
) -> torch.Tensor:
    return paged_attention.paged_attention_ref(*args, scale=scale)


TRITON = Kernels(
    rms_norm.rms_norm,
    linear.linear,
    rope.rope_and_store_kv,
    paged_attention.paged_attention,
    silu_mul.silu_mul,
)
REFERENCE = Kernels(
    rms_norm.rms_norm_ref,
    linear.linear_ref,
    rope.rope_and_store_kv_ref,
    _reference_attention,
    silu_mul.silu_mul_ref,
)


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    """A weight `[out, in]` and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class TorchWeights:
    """What all torch backends share: weights and values in `dtype` on `device`, and the work queue of that."""

    def __init__(self, *, dtype: str, device: str) -> None:
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.dtype_name = dtype
        self.keeps_fp8 = False  # until such a weight comes
        self.pooled = torch.empty(0, 0)  # of the last pass that pools rows
        self.recordings: Recordings | None = None  # of steps

    def matrix(self, parts: Sequence[Weights], bias: Weights | None = None) -> TorchMatrix:
        stacked = torch.cat([self.vector(part) for part in parts])
        return TorchMatrix(stacked, None if bias is None else self.vector(bias))

    def vector(self, x: Weights) -> torch.Tensor:
        return tensor_of(x).to(self.device, self.dtype)

    def table(self, x: Weights) -> torch.Tensor:
        return self.vector(x)

    def tied_head(self, table: torch.Tensor, embedding: Weights) -> TorchMatrix:
        del embedding  # the table has the layout of a matrix
        return TorchMatrix(table, None)

    @property
    def step(self) -> StepKind:
        return StepKind(element_bytes=self.dtype.itemsize, torch=True, fp8=self.keeps_fp8)

    def record_steps(self) -> None:
        """From now on record decode steps, where the device can. The references are not made for it."""
        if self.device.type == "cuda":
            self.recordings = Recordings(self.device)

    def computed(self, step: TorchValues, describe: Callable[[Any], Any]) -> torch.Tensor:
        """The results of a step, in float32."""
        if self.recordings is None:
            return cast("torch.Tensor", describe(step)).float()
        return self.recordings.run(step, lambda: describe(step))

    @property
    def ahead_on(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None

    def fence(self) -> Fence | None:
        """After all work given to the device so far; on a CPU that is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return event

    def turns(self, attention: Attention | MlaAttention) -> torch.Tensor:
        """Cosines, then sines, of the angles of each position, `[context_tokens, 2 * frequencies]` in float32."""
        positions = torch.arange(attention.context_tokens, dtype=torch.float32)
        inv_freq = torch.tensor(attention.inv_freq, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq).double()
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention.rope_scale
        return cos_sin.float().to(self.device)


class TorchBackend(TorchWeights):
    """Weights, values and cache in `dtype` ("float32", "bfloat16", "float16") on `device`."""

    def __init__(self, attention: Attention, *, dtype: str, device: str, kernels: Kernels) -> None:
        super().__init__(dtype=dtype, device=device)
        self.attention = attention
        self.kernels = kernels
        a = attention
        self._kv_shape = (a.block_tokens, a.kv_heads, a.head_dim)
        elements = 2 * a.layers * a.block_tokens * a.kv_heads * a.head_dim
        self.kv_block_bytes = elements * self.dtype.itemsize
        self.kv_layout = (
            f"torch-1 {dtype} layers={a.layers} kv_heads={a.kv_heads} head_dim={a.head_dim} "
            f"block_tokens={a.block_tokens} layers_per_group={LAYERS_PER_GROUP}"
        )
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer
        self.groups_after = groups_after(a.layers)
        self.cos_sin = self.turns(a)  # [context_tokens, head_dim]

    def allocate_kv(self, num_blocks: int) -> None:
        self.kv = []  # so that old and new never exist together
        if self.recordings is not None:
            self.recordings.forget()
        empty = partial(torch.zeros, num_blocks, *self._kv_shape)
        self.kv = [
            (
                empty(dtype=self.dtype, device=self.device),
                empty(dtype=self.dtype, device=self.device),
            )
            for _ in range(self.attention.layers)
        ]

    def kv_pool(self) -> KvPool:
        assert self.kv, "allocate_kv comes first"
        num_blocks = len(self.kv[0][0])
        return KvPool(
            num_blocks=num_blocks,
            block_bytes=self.kv_block_bytes,
            groups=[
                [region(half) for layer in layers for half in self.kv[layer]]
                for layers in layer_groups(self.attention.layers)
            ],
            device=self.device.type,
            memfd=None,
        )

    def compile(self, describe: Callable[[ForwardPass], Any]) -> Compiled:
        @torch.inference_mode()
        def run(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
            return self.computed(TorchStep(self, batch, progress), describe)

        return run


def groups_after(layers: int) -> dict[int, int]:
    """How many layer groups are whole once a layer is, for each layer that ends one."""
    return {group[-1]: i + 1 for i, group in enumerate(layer_groups(layers))}


def region(part: torch.Tensor) -> KvRegion:
    """A part of every block, one block after the other."""
    flat = part.view(-1).view(torch.uint8)
    nbytes = len(flat) // len(part)
    on_cpu = part.device.type == "cpu"
    memory = memoryview(cast("Any", flat.numpy())) if on_cpu else flat
    return KvRegion(memory=memory, stride=nbytes, offset=0, nbytes=nbytes)


class TorchValues:
    """The operations of a `ForwardPass` that need no cache, computed at once."""

    def __init__(self, batch: Batch, weights: TorchWeights, kernels: Kernels) -> None:
        device = weights.device
        self._weights = weights
        self._kernels = kernels
        self._tokens = upload(batch.tokens, device)
        if batch.newest is not None:
            of_batch_row = batch.newest[(-1 - self._tokens).clamp(min=0)]
            self._tokens = torch.where(self._tokens < 0, of_batch_row, self._tokens)
        self._logit_rows = upload(batch.logit_rows, device)
        pools = batch.pool_rows
        self._pool_rows = None if pools is None else upload(pools, device)
        # One row of each sequence, which no one else waits for.
        self._recordable = weights.recordings is not None and batch.rows == batch.seqs

    def _tables(self, batch: Batch) -> torch.Tensor:
        """Block tables; where a step may be recorded, as wide as those of steps whose contexts are somewhat longer."""
        tables = batch.block_tables
        if self._recordable:
            tables = np.pad(tables, ((0, 0), (0, -tables.shape[1] % TABLE_BLOCKS)))
        return upload(tables, self._weights.device)

    def inputs(self) -> list[torch.Tensor]:
        """For `Recordings`."""
        return [self._tokens, self._logit_rows]

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        return table[self._tokens]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def linear(
        self, x: torch.Tensor, weight: TorchMatrix, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self._kernels.linear(x, weight.weight)
        if weight.bias is not None:
            y += weight.bias
        if residual is not None:
            y += residual
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.silu_mul(gate_up)

    def wanted_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._logit_rows]

    def pool_rows(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if self._pool_rows is None:
            return
        rows = x[self._pool_rows]
        rows = rows if weight is None else self.rms_norm(rows, weight, eps)
        self._weights.pooled = rows.float()


class TorchStep(TorchValues):
    """A `ForwardPass` that computes at once."""

    def __init__(self, backend: TorchBackend, batch: Batch, progress: Progress | None) -> None:
        super().__init__(batch, backend, backend.kernels)
        self._backend = backend
        self._progress = progress
        device = backend.device
        self._recordable &= progress is None and self._pool_rows is None
        self._positions = upload(batch.positions, device)
        self._slots = upload(batch.slots, device)
        self._sequences = [
            self._tables(batch),
            upload(batch.seq_starts, device),
            upload(batch.context_lens, device),
        ]
        a = backend.attention
        self._plan = paged_attention.attention_plan(
            batch.seq_starts.tolist(),
            batch.context_lens.tolist(),
            heads=a.heads,
            dim=a.head_dim,
            device=device,
            padded=self._recordable,
        )

    def form(self) -> Form | None:
        """For `Recordings`."""
        return tuple(self._plan.spans.launches) if self._recordable else None

    def inputs(self) -> list[torch.Tensor]:
        plan = self._plan
        of_plan = [plan.tile_seq, plan.tile_row, plan.spans.works, plan.spans.rows]
        return [*super().inputs(), self._positions, self._slots, *self._sequences, *of_plan]

    def rope_and_store_kv(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        a = self._backend.attention
        heads = qkv.view(len(qkv), -1, a.head_dim)
        q, k, v = heads.split((a.heads, a.kv_heads, a.kv_heads), dim=1)
        self._kernels.rope_and_store_kv(
            q, k, v, self._backend.cos_sin, self._positions, self._slots, *self._backend.kv[layer]
        )
        if self._progress is not None and layer in self._backend.groups_after:
            self._progress(self._backend.groups_after[layer], self._backend.fence())
        return qkv

    def paged_attention(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        a = self._backend.attention
        q = qkv[:, : a.heads * a.head_dim].reshape(len(qkv), a.heads, a.head_dim)
        out = self._kernels.paged_attention(
            q.contiguous(),
            *self._backend.kv[layer],
            *self._sequences,
            scale=a.scale,
            plan=self._plan,
        )
        return out.view(len(qkv), -1)

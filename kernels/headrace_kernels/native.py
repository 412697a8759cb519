"""The CPU backend: Rust kernels on one thread, with one fixed order of arithmetic for every element.

A description is recorded once; then a step is one call with the GIL released. Weights and results are arrays of numpy:
torch is only imported where ranks of a group exchange rows or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace import _core
from headrace_kernels.lazy import Lazy
from headrace_kernels.ops import (
    LAYERS_PER_GROUP,
    Attention,
    Compiled,
    CompiledDraft,
    GatedMlp,
    HostArray,
    KvPool,
    KvRegion,
    MlaAttention,
    Progress,
    Routing,
    StepKind,
    layer_groups,
)
from headrace_kernels.pool_memory import PoolMemory

if TYPE_CHECKING:
    import torch

    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.moe.dispatch import Dispatch, Sent

Floats = NDArray[np.float32]
STORED = ("bfloat16", "float16")  # beside float32


class NativeBackend:
    """Weights as `dtype` ("float32", "bfloat16", "float16", "int8"); arithmetic and cache are float32.

    `simd` forces an instruction set, for tests. Raises ValueError when `block_tokens` is not a multiple of 16.
    """

    answers_apart = False
    ahead_on = None
    step: StepKind = StepKind(element_bytes=4, torch=False)

    def __init__(
        self, attention: Attention | MlaAttention, *, dtype: str, simd: str | None = None
    ) -> None:
        self._attention = attention
        self._simd = simd
        self.dtype_name = dtype
        self.kv_block_bytes = self._program().block_bytes
        self.kv_layout = _layout(attention)
        self._memory: PoolMemory | None = None
        self._kv: Floats | None = None
        # What the last main pass and the last draft pass kept for draft passes.
        self._hidden = self._drafted = np.empty((0, _tail(attention)), np.float32)
        self._pooled = np.empty((0, 0), np.float32)

    def record_steps(self) -> None:
        """A step is one program already."""

    def _program(self) -> _core.Program:
        a = self._attention
        if isinstance(a, Attention):
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
        return _core.Program.latent(
            heads=a.heads,
            kv_lora_rank=a.kv_lora_rank,
            nope_dim=a.nope_dim,
            rope_dim=a.rope_dim,
            v_dim=a.v_dim,
            layers=a.layers,
            block_tokens=a.block_tokens,
            scale=a.scale,
            inv_freq=list(a.inv_freq),
            rope_scale=a.rope_scale,
            rope_interleave=a.rope_interleave,
            hidden_tail=_tail(a),
            simd=self._simd,
        )

    def matrix(self, parts: Sequence[HostArray], bias: HostArray | None = None) -> _core.Weight:
        stored = _stored(parts)
        arrays = [_array(part, stored) for part in parts]
        return _core.Weight(
            arrays, stored, self.dtype_name, None if bias is None else self.vector(bias)
        )

    def head_matrices(self, kv_b: HostArray) -> _core.HeadMatrices:
        a = self.latent_heads(kv_b)
        stored = _stored([kv_b])
        return _core.HeadMatrices(
            _array(kv_b.reshape(-1, a.kv_lora_rank), stored),
            stored,
            self.dtype_name,
            heads=a.heads,
            nope_dim=a.nope_dim,
            v_dim=a.v_dim,
        )

    def latent_heads(self, kv_b: HostArray) -> MlaAttention:
        """What `kv_b` is for. Raises ValueError where it has another shape."""
        a = self._attention
        assert isinstance(a, MlaAttention), "the model's heads have keys of their own"
        shape = (a.heads, a.nope_dim + a.v_dim, a.kv_lora_rank)
        if kv_b.shape != shape:
            raise ValueError(f"kv_b is {tuple(kv_b.shape)}, expected {shape}")
        return a

    def experts(
        self,
        gate: HostArray,
        bias: HostArray,
        gate_up: Sequence[HostArray],
        down: Sequence[HostArray],
        routing: Routing,
        *,
        shared: GatedMlp | None = None,
        dispatch: Dispatch | None = None,
    ) -> _core.Experts:
        if len(gate) != routing.experts:
            raise ValueError(f"experts: gate has {len(gate)} rows, expected {routing.experts}")
        count = routing.experts if dispatch is None else len(gate_up)
        return _core.Experts(
            self.float_rows(gate),
            self.vector(bias),
            self.slots(gate_up, down, (count, gate.shape[1])),
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            normalise=routing.normalise,
            scale=routing.scale,
            shared=None if shared is None else (shared.gate_up, shared.down),
            exchange=None if dispatch is None else _exchange(dispatch),
            partial=dispatch is not None and dispatch.combine == "partial",
        )

    def slots(
        self, gate_up: Sequence[HostArray], down: Sequence[HostArray], shape: tuple[int, int]
    ) -> _core.Slots:
        """As many as `shape` says, and the width of their rows."""
        return _core.Slots(_arrays(gate_up), _arrays(down), shape, self.dtype_name)

    def float_rows(self, x: HostArray) -> Floats:
        """Rows that stay float32 whatever the weights are."""
        return np.ascontiguousarray(x, dtype=np.float32)

    def expert_counts(self, experts: _core.Experts) -> NDArray[np.int64]:
        return experts.counts.astype(np.int64)

    def overwrite_expert(
        self, experts: _core.Experts, slot: int, gate_up: HostArray, down: HostArray
    ) -> None:
        """Waits while the layer computes. ValueError where there is no such slot, or the expert has another shape."""
        experts.overwrite(slot, stored_array(gate_up), stored_array(down))

    def slot_bytes(self, experts: _core.Experts) -> int:
        return experts.slot_nbytes

    def read_slot(self, experts: _core.Experts, slot: int) -> torch.Tensor:
        """A tensor, as ranks send it to each other."""
        import torch

        return torch.from_numpy(experts.read_slot(slot))

    def write_slot(self, experts: _core.Experts, slot: int, image: torch.Tensor) -> None:
        """Waits while the layer computes. ValueError where there is no such slot, or the image is of another size."""
        experts.write_slot(slot, image.numpy())

    def vector(self, x: HostArray) -> list[float]:
        return x.astype(np.float32).tolist()

    def table(self, x: HostArray) -> _core.Table:
        return _core.Table(*stored_array(x))

    def tied_head(self, table: _core.Table, embedding: HostArray) -> _core.Weight:
        del table  # products read panels of columns, look-ups read rows
        return self.matrix([embedding])

    def allocate_kv(self, num_blocks: int) -> None:
        self._kv = self._memory = None  # so that old and new never exist together
        self._memory = PoolMemory(num_blocks * self.kv_block_bytes)
        self._kv = np.frombuffer(self._memory.view, np.float32)

    def kv_pool(self) -> KvPool:
        assert self._memory is not None, "allocate_kv comes first"
        tail_bytes = 4 * _tail(self._attention)
        layer_bytes = (self.kv_block_bytes - tail_bytes) // self._attention.layers
        groups = [
            [
                KvRegion(
                    memory=self._memory.view,
                    stride=self.kv_block_bytes,
                    offset=layers.start * layer_bytes,
                    nbytes=len(layers) * layer_bytes
                    + (tail_bytes if layers.stop == self._attention.layers else 0),
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

    @property
    def pooled(self) -> Floats:
        return self._pooled

    def fence(self) -> None:
        """A step is done when it returns."""

    def compile(self, describe: Callable[[Any], Any]) -> Compiled:
        recorded = _Recorded(self._program(), describe)

        def run(batch: Batch, progress: Progress | None = None) -> Floats:
            kept = recorded.kept_rows(batch)
            step = partial(recorded.run, batch, self._kv, kept=kept)
            if batch.pool_rows is not None:
                pooled = recorded.pooled_rows(batch.pool_rows)
                step = partial(step, pool_rows=batch.pool_rows, pooled=pooled)
                self._pooled = pooled
            if progress is None:
                out = step()
            else:
                out = step(progress=progress, layers_per_group=LAYERS_PER_GROUP)
            if kept is not None:
                self._hidden = kept
            return out

        return run

    def compile_draft(self, describe: Callable[[Any], Any]) -> CompiledDraft:
        recorded = _Recorded(self._program(), describe)

        def run(batch: DraftBatch) -> Floats:
            kept = recorded.kept_rows(batch)
            out = recorded.run(
                batch,
                self._kv,
                kept=kept,
                hidden=self._drafted if batch.chained else self._hidden,
                hidden_from=batch.hidden_from,
                first_keys=batch.first_keys,
            )
            if kept is not None:
                self._drafted = kept
            return out

        return run


def _exchange(dispatch: Dispatch) -> _Exchange | _core.SharedExchange:
    """What the program exchanges rows by: without Python where that can be."""
    from headrace_kernels.moe.dispatch import NativeDispatch  # whoever has a dispatch has torch

    native = dispatch.native() if isinstance(dispatch, NativeDispatch) else None
    return _Exchange(dispatch) if native is None else native


class _Exchange:
    """A `Dispatch` as the program calls it: one layer of one step after the other, with arrays."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._sent: Sent | None = None

    def send(self, x: Floats, ids: NDArray[np.int32], weights: Floats) -> None:
        import torch

        from headrace_kernels.moe.dispatch import Routed

        routed = Routed(*map(torch.from_numpy, (x, ids, weights)))
        self._sent = self._dispatch.send(routed)

    def receive(self) -> tuple[Floats, NDArray[np.int32], Floats]:
        assert self._sent is not None, "send comes first"
        received = self._sent.receive()[:3]  # rows in e4m3, which have scales, are for GPUs
        x, slots, weights = (part.contiguous().numpy() for part in received)
        return x, slots, weights

    def collect(self, y: Floats, places: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int32]]:
        import torch

        assert self._sent is not None, "send comes first"
        sent, self._sent = self._sent, None
        back = sent.collect(torch.from_numpy(y), torch.from_numpy(places))
        return back.y.contiguous().numpy(), back.places.contiguous().numpy()


class _Recorded:
    """A program and the memory of its results."""

    def __init__(self, program: _core.Program, describe: Callable[[Any], Any]) -> None:
        self._program = program
        describe(program)  # its methods are the operations of `MlaStep`
        program.finish()
        self._out = np.empty((0, program.out_width), np.float32)

    def kept_rows(self, batch: Batch) -> Floats | None:
        """Room for what a run keeps. A chained pass reads what the one before kept, so each has its own."""
        width = self._program.kept_width
        return np.empty((batch.rows, width), np.float32) if width else None

    def pooled_rows(self, rows: NDArray[np.int32]) -> Floats:
        return np.empty((len(rows), self._program.pooled_width), np.float32)

    def run(self, batch: Batch, kv: Floats | None, **others: Any) -> Floats:
        assert kv is not None, "allocate_kv comes first"
        wanted = len(batch.logit_rows)
        if wanted > len(self._out):
            self._out = np.empty((wanted, self._program.out_width), np.float32)
        self._program.run(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots,
            seq_starts=batch.seq_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_rows=batch.logit_rows,
            kv=kv,
            out=self._out[:wanted],
            **others,
        )
        return self._out[:wanted]


def _tail(a: Attention | MlaAttention) -> int:
    """Floats of the hidden tail of a block."""
    return a.hidden_size if isinstance(a, MlaAttention) and a.mtp else 0


def _layout(a: Attention | MlaAttention) -> str:
    """Names all that the bytes of a block depend on."""
    size = f"block_tokens={a.block_tokens} layers_per_group={LAYERS_PER_GROUP}"
    if isinstance(a, Attention):
        heads = f"kv_heads={a.kv_heads} head_dim={a.head_dim}"
        return f"native-1 float32 layers={a.layers} {heads} {size}"
    # Where heads have a part that is not turned, the latent is also part of the keys.
    keys = "latent+rope" if a.nope_dim else "rope"
    turned = "interleaved" if a.rope_interleave else "halves"
    parts = f"latent={a.kv_lora_rank} rope={a.rope_dim} {turned} keys={keys}"
    mtp = f" mtp hidden={a.hidden_size}" if a.mtp else ""
    return f"native-mla-1 float32 layers={a.layers} {parts} {size}{mtp}"


def _stored(parts: Sequence[HostArray]) -> str:
    """The dtype that all parts have in memory, or can be given without loss."""
    dtypes = {part.dtype.name if part.dtype.name in STORED else "float32" for part in parts}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _arrays(tensors: Sequence[HostArray]) -> Lazy[tuple[HostArray, str]]:
    """As Rust takes them, with the dtype in which each is stored."""

    return Lazy(range(len(tensors)), lambda i: stored_array(tensors[i]))


def stored_array(x: HostArray) -> tuple[HostArray, str]:
    """As Rust takes it, and the dtype in which it is stored."""
    stored = _stored([x])
    return _array(x, stored), stored


def _array(x: HostArray, stored: str) -> HostArray:
    if stored == "float32":
        return np.ascontiguousarray(x, dtype=np.float32)
    return np.ascontiguousarray(x).view(np.uint16)

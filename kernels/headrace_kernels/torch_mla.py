"""The torch backend of latent attention, experts and drafting: Triton kernels on a GPU, or their torch references.

Prompt rows, where a batch says which they are (`Batch.prompt_lens`), make keys and values of the latents first, which
takes a third of the arithmetic; all others attend absorbed. Either kind has the same bits however its step was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace_kernels import torch_ops
from headrace_kernels.attention import mla_attention, mla_prefill, mla_store
from headrace_kernels.dense import fp8_linear
from headrace_kernels.dense.fp8_linear import Fp8Matrix, fp8_matrix
from headrace_kernels.lazy import Lazy
from headrace_kernels.moe import experts
from headrace_kernels.moe.dispatch import SingleRank
from headrace_kernels.moe.fp8_grouped_linear import fp8_experts
from headrace_kernels.ops import (
    LAYERS_PER_GROUP,
    Compiled,
    CompiledDraft,
    GatedMlp,
    KvPool,
    MlaAttention,
    MlaStep,
    Progress,
    Routing,
    layer_groups,
)
from headrace_kernels.recordings import Form
from headrace_kernels.torch_ops import (
    Kernels,
    TorchMatrix,
    TorchValues,
    TorchWeights,
    groups_after,
    region,
)
from headrace_kernels.upload import Weights, tensor_of, upload

if TYPE_CHECKING:
    from headrace_kernels.batch import Batch, DraftBatch
    from headrace_kernels.moe.dispatch import Dispatch


@dataclass(frozen=True, slots=True)
class MlaKernels:
    """The functions that come in two kinds, beside those of every model."""

    base: Kernels
    mla_store: Callable[..., torch.Tensor]
    mla_attention: Callable[..., torch.Tensor]
    mla_prefill: Callable[..., torch.Tensor]
    moe: Callable[..., torch.Tensor]
    fp8_linear: Callable[..., torch.Tensor]


TRITON = MlaKernels(
    torch_ops.TRITON,
    mla_store.mla_store,
    mla_attention.mla_attention,
    mla_prefill.mla_prefill,
    experts.moe,
    fp8_linear.fp8_linear,
)
REFERENCE = MlaKernels(
    torch_ops.REFERENCE,
    mla_store.mla_store_ref,
    mla_attention.mla_attention_ref,
    mla_prefill.mla_prefill_ref,
    experts.moe_ref,
    fp8_linear.fp8_linear_ref,
)


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """An FP8 weight `[out, in]` and its bias."""

    weight: Fp8Matrix
    bias: torch.Tensor | None


class TorchMlaBackend(TorchWeights):
    """Weights and values in `dtype` on `device`; the cache too, or in FP8 with the scale 1 ("float8_e4m3fn")."""

    answers_apart = True

    def __init__(
        self,
        attention: MlaAttention,
        *,
        dtype: str,
        device: str,
        kernels: MlaKernels,
        kv_dtype: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype, device=device)
        self.attention = attention
        self.kernels = kernels
        self.kv_dtype: torch.dtype = getattr(torch, kv_dtype or dtype)
        a = attention
        self.entry_width = a.kv_lora_rank + a.rope_dim  # of a token in a layer
        elements = a.layers * a.block_tokens * self.entry_width
        tail_bytes = a.hidden_size * self.dtype.itemsize if a.mtp else 0
        self.kv_block_bytes = elements * self.kv_dtype.itemsize + tail_bytes
        self.kv_layout = (
            f"torch-mla-1 {kv_dtype or dtype} layers={a.layers} latent={a.kv_lora_rank} "
            f"rope={a.rope_dim} block_tokens={a.block_tokens} layers_per_group={LAYERS_PER_GROUP}"
        ) + (f" mtp hidden={a.hidden_size} {dtype}" if a.mtp else "")
        self.kv: list[torch.Tensor] = []  # of each layer, [blocks, block_tokens, entry_width]
        self.tails: torch.Tensor | None = (
            None  # [blocks, hidden_size], the hidden tail of each block
        )
        # Rows that draft passes may read: of the main pass, and of the last draft pass.
        self.kept: dict[bool, torch.Tensor] = {}
        self.alone = True  # no layer has experts on other ranks
        self.groups_after = groups_after(a.layers)
        self.cos_sin = self.turns(a)  # [context_tokens, rope_dim]

    def fp8_matrix(
        self, parts: Sequence[tuple[Weights, Weights]], bias: Weights | None = None
    ) -> ScaledMatrix:
        """FP8 matrices `[out_i, in]` with their scales as one, stacked, which stays in FP8."""
        self.keeps_fp8 = True
        here = [
            (tensor_of(weight).to(self.device), tensor_of(scale).to(self.device))
            for weight, scale in parts
        ]
        return ScaledMatrix(fp8_matrix(here), None if bias is None else self.vector(bias))

    def head_matrices(self, kv_b: Weights) -> torch.Tensor:
        return self.vector(kv_b).contiguous()

    def experts(
        self,
        gate: Weights,
        bias: Weights,
        gate_up: Sequence[Weights],
        down: Sequence[Weights],
        routing: Routing,
        *,
        shared: GatedMlp | None = None,
        dispatch: Dispatch | None = None,
    ) -> experts.Experts:
        def stacked(parts: Sequence[Weights]) -> torch.Tensor:
            return stack(parts, self.dtype, self.device)

        here = stacked(gate_up), stacked(down)
        return self._experts(gate, bias, *here, routing, shared, dispatch)

    def fp8_experts(
        self,
        gate: Weights,
        bias: Weights,
        gate_up: Sequence[Sequence[tuple[Weights, Weights]]],
        down: Sequence[Sequence[tuple[Weights, Weights]]],
        routing: Routing,
        *,
        shared: GatedMlp | None = None,
        dispatch: Dispatch | None = None,
    ) -> experts.Experts:
        """Like `experts`, with each matrix as stacked FP8 parts and their scales, which stays in FP8."""

        def stacked(
            experts: Sequence[Sequence[tuple[Weights, Weights]]],
        ) -> experts.Fp8Experts:
            matrices = Lazy(range(len(experts)), lambda i: self.fp8_matrix(experts[i]).weight)
            return fp8_experts(matrices)

        here = stacked(gate_up), stacked(down)
        return self._experts(gate, bias, *here, routing, shared, dispatch)

    def _experts(
        self,
        gate: Weights,
        bias: Weights,
        gate_up: Any,
        down: Any,
        routing: Routing,
        shared: GatedMlp | None,
        dispatch: Dispatch | None,
    ) -> experts.Experts:
        self.alone &= dispatch is None or isinstance(dispatch, SingleRank)
        return experts.Experts(
            gate=tensor_of(gate).to(self.device, torch.float32),
            bias=tensor_of(bias).to(self.device, torch.float32),
            counts=torch.zeros(len(gate), dtype=torch.int64, device=self.device),
            gate_up=gate_up,
            down=down,
            routing=routing,
            dispatch=dispatch or SingleRank(),
            shared=shared,
        )

    def expert_counts(self, experts: experts.Experts) -> np.ndarray[Any, np.dtype[np.int64]]:
        return experts.counts.cpu().numpy()

    def overwrite_expert(
        self, experts: experts.Experts, slot: int, gate_up: Weights, down: Weights
    ) -> None:
        experts.overwrite(slot, tensor_of(gate_up), tensor_of(down))

    def overwrite_fp8_expert(
        self,
        experts: experts.Experts,
        slot: int,
        gate_up: Sequence[tuple[Weights, Weights]],
        down: Sequence[tuple[Weights, Weights]],
    ) -> None:
        """The same for an expert as `fp8_experts` takes it."""
        experts.overwrite(slot, self.fp8_matrix(gate_up).weight, self.fp8_matrix(down).weight)

    def slot_bytes(self, experts: experts.Experts) -> int:
        return sum(part.nbytes for part in experts.slot(0))

    def read_slot(self, experts: experts.Experts, slot: int) -> torch.Tensor:
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in experts.slot(slot)])

    def write_slot(self, experts: experts.Experts, slot: int, image: torch.Tensor) -> None:
        parts = experts.slot(slot)
        sizes = [part.nbytes for part in parts]
        if image.dtype != torch.uint8 or image.shape != (sum(sizes),):
            raise ValueError(f"an image of {tuple(image.shape)}, a slot has {sum(sizes)} bytes")
        for part, piece in zip(parts, image.split(sizes), strict=True):
            part.view(-1).view(torch.uint8).copy_(piece)

    def allocate_kv(self, num_blocks: int) -> None:
        self.kv, self.tails, self.kept = [], None, {}  # so that old and new never exist together
        if self.recordings is not None:
            self.recordings.forget()
        a = self.attention
        shape = (num_blocks, a.block_tokens, self.entry_width * self.kv_dtype.itemsize)
        empty = partial(torch.zeros, dtype=torch.uint8, device=self.device)
        self.kv = [empty(shape).view(self.kv_dtype) for _ in range(a.layers)]
        if a.mtp:
            self.tails = torch.zeros(
                num_blocks, a.hidden_size, dtype=self.dtype, device=self.device
            )

    def kv_pool(self) -> KvPool:
        assert self.kv, "allocate_kv comes first"
        groups = [
            [region(self.kv[layer]) for layer in layers]
            for layers in layer_groups(self.attention.layers)
        ]
        if self.tails is not None:
            groups[-1].append(region(self.tails))
        return KvPool(
            num_blocks=len(self.kv[0]),
            block_bytes=self.kv_block_bytes,
            groups=groups,
            device=self.device.type,
            memfd=None,
        )

    def compile(self, describe: Callable[[MlaStep], Any]) -> Compiled:
        @torch.inference_mode()
        def run(batch: Batch, progress: Progress | None = None) -> torch.Tensor:
            return self.computed(TorchMlaStep(self, batch, progress), describe)

        return run

    def compile_draft(self, describe: Callable[[MlaStep], Any]) -> CompiledDraft:
        @torch.inference_mode()
        def run(batch: DraftBatch) -> torch.Tensor:
            return cast("torch.Tensor", describe(TorchDraftStep(self, batch))).float()

        return run


def stack(parts: Sequence[Weights], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All parts as one. Each is asked for once, and let go of before the next."""
    first = tensor_of(parts[0])
    whole = torch.empty(len(parts), *first.shape, dtype=dtype, device=device)
    whole[0] = first
    del first
    for i in range(1, len(parts)):
        whole[i] = tensor_of(parts[i])
    return whole


class TorchMlaStep(TorchValues):
    """The main pass."""

    def __init__(
        self, backend: TorchMlaBackend, batch: Batch, progress: Progress | None = None
    ) -> None:
        super().__init__(batch, backend, backend.kernels.base)
        self._backend = backend
        self._progress = progress
        # Drafts read what a pass before them kept.
        draws_on = progress is not None or backend.attention.mtp or self._pool_rows is not None
        self._recordable &= backend.alone and not draws_on
        self._block_tables = self._tables(batch)
        self._positions = self._here(batch.positions)
        self._slots = self._here(batch.slots)
        self._row_seqs = self._here(_row_seqs(batch))
        self._first_keys = torch.zeros(batch.seqs, dtype=torch.int32, device=backend.device)
        self._prompt = _Prompt.of(batch, backend.device)
        self._recordable &= self._prompt is None
        a = backend.attention
        absorbed = slice(None) if self._prompt is None else self._prompt.other_rows
        self._plan = mla_attention.attention_plan(
            batch.positions[absorbed],
            heads=a.heads,
            kv_lora=a.kv_lora_rank,
            device=backend.device,
            padded=self._recordable,
        )
        # The newest row of each block that is written into.
        offsets = batch.slots % backend.attention.block_tokens
        newest = offsets == backend.attention.block_tokens - 1
        newest[batch.seq_starts[1:][np.diff(batch.seq_starts) > 0] - 1] = True
        self._newest = self._here(np.flatnonzero(newest))

    def form(self) -> Form | None:
        """For `Recordings`."""
        return tuple(self._plan.launches) if self._recordable else None

    def inputs(self) -> list[torch.Tensor]:
        plan = [self._plan.works, self._plan.rows]
        rows = [self._positions, self._slots, self._row_seqs, self._newest]
        return [*super().inputs(), self._block_tables, *rows, *plan]

    def _here(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return upload(array, self._backend.device)

    def linear(
        self,
        x: torch.Tensor,
        weight: TorchMatrix | ScaledMatrix,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(weight, TorchMatrix):
            return super().linear(x, weight, residual)
        y = self._backend.kernels.fp8_linear(x, weight.weight)
        if weight.bias is not None:
            y += weight.bias
        if residual is not None:
            y += residual
        return y

    def columns(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return x[:, start:stop].contiguous()

    def concat(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a, b), dim=1)

    def mla_store(
        self, q: torch.Tensor, latent: torch.Tensor, norm: torch.Tensor, eps: float, layer: int
    ) -> torch.Tensor:
        backend = self._backend
        backend.kernels.mla_store(
            self._heads(q),
            latent,
            norm,
            eps,
            backend.cos_sin,
            self._positions,
            self._slots,
            backend.kv[layer],
            rope_interleave=backend.attention.rope_interleave,
        )
        if self._progress is not None and layer in backend.groups_after:
            self._progress(backend.groups_after[layer], backend.fence())
        return q

    def mla_attention(self, q: torch.Tensor, kv_b: torch.Tensor, layer: int) -> torch.Tensor:
        heads = self._heads(q)
        if self._prompt is None:
            out = self._absorbed(heads, kv_b, layer, self._row_seqs, self._positions)
        else:
            out = self._apart(heads, kv_b, layer, self._prompt)
        return out.flatten(1)

    def _heads(self, q: torch.Tensor) -> torch.Tensor:
        return q.unflatten(1, (self._backend.attention.heads, -1))

    def _absorbed(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        layer: int,
        row_seqs: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return self._backend.kernels.mla_attention(
            q,
            kv_b,
            self._backend.kv[layer],
            self._block_tables,
            row_seqs,
            positions,
            self._first_keys,
            scale=self._backend.attention.scale,
            plan=self._plan,
        )

    def _apart(
        self, q: torch.Tensor, kv_b: torch.Tensor, layer: int, prompt: _Prompt
    ) -> torch.Tensor:
        """Prompt rows with expanded keys and values, the others absorbed."""
        out = q.new_empty(*q.shape[:2], self._backend.attention.v_dim)
        out[prompt.rows] = self._backend.kernels.mla_prefill(
            q[prompt.rows],
            kv_b,
            self._backend.kv[layer],
            self._block_tables[prompt.seqs],
            self._first_keys[prompt.seqs],
            prompt.plan,
            scale=self._backend.attention.scale,
        )
        if len(prompt.others):
            row_seqs, positions = self._row_seqs[prompt.others], self._positions[prompt.others]
            out[prompt.others] = self._absorbed(q[prompt.others], kv_b, layer, row_seqs, positions)
        return out

    def moe(
        self, x: torch.Tensor, experts: experts.Experts, residual: torch.Tensor
    ) -> torch.Tensor:
        mlp = experts.shared

        def shared(residual: torch.Tensor) -> torch.Tensor:
            assert mlp is not None
            middle = self.silu_mul(self.linear(x, mlp.gate_up))
            return self.linear(middle, mlp.down, residual)

        return self._backend.kernels.moe(x, experts, residual, None if mlp is None else shared)

    def keep_hidden(self, x: torch.Tensor) -> None:
        backend = self._backend
        assert backend.tails is not None, "made for a model that drafts"
        backend.kept = {False: x}
        blocks = self._slots[self._newest] // backend.attention.block_tokens
        backend.tails[blocks] = x[self._newest]

    def hidden(self) -> torch.Tensor:
        raise AssertionError("only a draft pass reads kept rows")


class TorchDraftStep(TorchMlaStep):
    """A pass of the layer that drafts."""

    def __init__(self, backend: TorchMlaBackend, batch: DraftBatch) -> None:
        super().__init__(backend, batch)
        self._first_keys = self._here(batch.first_keys)
        self._hidden_from = self._here(batch.hidden_from).long()
        self._chained = batch.chained

    def keep_hidden(self, x: torch.Tensor) -> None:
        self._backend.kept[True] = x

    def hidden(self) -> torch.Tensor:
        source, tails = self._hidden_from, self._backend.tails
        assert tails is not None, "made for a model that drafts"
        kept = self._backend.kept.get(self._chained)
        if kept is None or not len(kept):  # all rows come from tails
            kept = tails[:1]
        of_tail = tails[(-source - 1).clamp(min=0)]
        return torch.where(source[:, None] < 0, of_tail, kept[source.clamp(min=0)])


class _Prompt:
    """Which rows of a batch are prompt: in each sequence the first ones."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> _Prompt | None:
        """`None` where no row is."""
        if batch.prompt_lens is None:
            return None
        before = batch.context_lens - np.diff(batch.seq_starts)
        return cls(batch, device) if (before < batch.prompt_lens).any() else None

    def __init__(self, batch: Batch, device: torch.device) -> None:
        assert batch.prompt_lens is not None
        starts = batch.seq_starts
        counts = np.diff(starts)
        # Rows of a sequence follow one another, so its first position says which of them are prompt.
        first = batch.context_lens - counts
        rows = np.clip(batch.prompt_lens - first, 0, counts)
        seqs = np.flatnonzero(rows)
        row_seqs = _row_seqs(batch)
        is_prompt = batch.positions < batch.prompt_lens[row_seqs]
        self.rows = upload(np.flatnonzero(is_prompt), device)
        self.other_rows = np.flatnonzero(~is_prompt)
        self.others = upload(self.other_rows, device)
        self.seqs = upload(seqs, device)
        seq_starts = [0, *np.cumsum(rows[seqs]).tolist()]
        contexts = (first + rows)[seqs].tolist()
        self.plan = mla_prefill.prefill_plan(seq_starts, contexts, device)


def _row_seqs(batch: Batch) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The sequence of each row."""
    return np.repeat(np.arange(batch.seqs, dtype=np.int32), np.diff(batch.seq_starts))

"""The plan of what a step takes, against what torch hands out while the largest step runs.

It must not be less, or a full cache fails the step; and not far more, or memory lies idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from headrace.models import Model, step_memory
from headrace.models.deepseek import Deepseek
from headrace.models.deepseek import attention_of as latent_attention
from headrace.models.deepseek_weights import Share, load_weights
from headrace.models.llama import Llama, attention_of
from headrace.models.llama import load_weights as load_llama_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels import torch_mla, torch_ops
from headrace_kernels.attention import mla_attention, mla_prefill, paged_attention, span_plan
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.moe import experts
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.permute import permute_ref
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.moe.transport import Arrived, Columns, Span
from helpers.kernels.live_bytes import LiveBytes
from helpers.kernels.tensor_backend import floats_of
from helpers.models.tiny_deepseek import quantise_fp8, save_tensors, tiny_config, tiny_tensors
from helpers.models.tiny_model import tiny_llama, write_json_files

BLOCK, ROWS, CONTEXT = 16, 96, 160
MOST_TOO_MUCH = 1.6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do nothing, as only what is allocated around them counts. A short context has spans that take turns."""

    def launch(_kernel: object, _grid: object) -> Callable[..., None]:
        return lambda *_args, **_options: None

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    for module in (mla_attention, mla_prefill, paged_attention):
        monkeypatch.setattr(module, "SPAN", 64)
    monkeypatch.setattr(mla_prefill, "LAUNCH_TOKENS", 128)
    monkeypatch.setattr(span_plan, "PART_BYTES", 60_000)
    monkeypatch.setattr(step_memory, "DRAW_BYTES", 0)


def largest(model: Model, *, prompt: bool) -> Batch:
    """Rows behind a context, all with logits: one prompt, or answers of as many sequences."""
    model.allocate_kv(ROWS * CONTEXT // BLOCK)
    seqs = 1 if prompt else ROWS
    per_seq = ROWS // seqs
    blocks = CONTEXT // BLOCK
    tables = np.arange(seqs * blocks, dtype=np.int32).reshape(seqs, blocks)
    positions = np.tile(np.arange(CONTEXT - per_seq, CONTEXT, dtype=np.int32), seqs)
    owner = np.repeat(np.arange(seqs), per_seq)
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return Batch(
        tokens=np.arange(ROWS, dtype=np.int32) % 50,
        positions=positions,
        slots=slots,
        seq_starts=np.arange(0, ROWS + 1, per_seq, dtype=np.int32),
        context_lens=np.full(seqs, CONTEXT, np.int32),
        block_tables=tables,
        logit_rows=np.arange(ROWS, dtype=np.int32),
        prompt_lens=np.full(seqs, CONTEXT if prompt else 1, np.int32),
    )


def drafted(batch: Batch) -> DraftBatch:
    return DraftBatch(
        tokens=batch.tokens, positions=batch.positions, slots=batch.slots, seq_starts=batch.seq_starts,
        context_lens=batch.context_lens, block_tables=batch.block_tables, logit_rows=batch.logit_rows,
        hidden_from=np.arange(ROWS, dtype=np.int32), first_keys=np.ones(batch.seqs, np.int32), chained=False,
    )  # fmt: skip


class Flooded:
    """A `Transport` on which every other rank sends to this one what this one sends to itself."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def begin(self, round_number: int) -> None:
        """Nothing is kept."""

    def post(self, columns: Columns, parcels: Sequence[Span]) -> Callable[[], Arrived]:
        rows = [end - start for start, end in parcels]
        results = columns[0]
        if len(columns) > 1:  # rows that ask this rank's experts
            start, end = parcels[0]
            back = tuple(torch.cat([c[start:end]] * self.ranks) for c in columns)
            return lambda: Arrived(back, rows[:1] * self.ranks)
        own = results[: rows[0]].clone()
        return lambda: Arrived((own,), [rows[0]] + [0] * (self.ranks - 1))

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_of_other_ranks(
    fp8: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of all ranks choose the experts of this one."""
    shape = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "topk_group": 2}
    raw = tiny_config() | shape | {"num_hidden_layers": 2}
    tensors = tiny_tensors(raw)
    write_json_files(tmp_path, raw)
    save_tensors(tmp_path, quantise_fp8(tensors)[0] if fp8 else tensors)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    backend = torch_mla.TorchMlaBackend(
        latent_attention(checkpoint.config, BLOCK, mtp=False), dtype="bfloat16", device=DEVICE,
        kernels=torch_mla.TRITON,
    )  # fmt: skip
    dispatch = partial(
        AllToAll.of, transport=Flooded(ranks), combine="exact", device=torch.device(DEVICE)
    )
    layers = {1: LayerPlacement.even(raw["n_routed_experts"], ranks)}
    share = Share(rank=0, layers=layers, dispatch=dispatch)
    weights = load_weights(checkpoint, backend, fp8=backend if fp8 else None, share=share)

    def to_rank_0(logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE).repeat(len(logits), 1)
        return ids, ids.float()

    kernels = replace(experts.TRITON, route=to_rank_0, permute=permute_ref)
    monkeypatch.setattr(experts, "TRITON", kernels)
    model = Deepseek(checkpoint.config, weights, backend, BLOCK, share)
    check(model)
    alone = Deepseek(checkpoint.config, weights, backend, BLOCK)
    here, there = (
        it.step_memory(rows=ROWS, answers=ROWS, context_tokens=CONTEXT, mtp=False).mlp
        for it in (alone, model)
    )
    assert here < there


def check(model: Model, *, mtp: bool = False) -> None:
    taken = 0
    for prompt in (True, False):
        batch = largest(model, prompt=prompt)
        with LiveBytes() as live:
            logits = model.forward(batch)
            raw = floats_of(logits)  # as the sampler does for log-probabilities
            del logits, raw
            if mtp:
                model.draft(drafted(batch))
        taken = max(taken, live.most)
    plan = model.step_memory(rows=ROWS, answers=ROWS, context_tokens=CONTEXT, mtp=mtp)
    assert taken <= plan.total <= taken * MOST_TOO_MUCH, (taken, str(plan))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16},  # attention
        {"intermediate_size": 1024},  # mlp
        {"vocab_size": 2000},  # logits
        # Products whose parts take most: into queries, keys and values; into the MLP.
        {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16},
        {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 16},
    ],
    ids=["attention", "mlp", "logits", "parts of attention", "parts of mlp"],
)
def test_llama(shape: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path / "m", **shape))
    attention = attention_of(checkpoint.config, BLOCK)
    backend = torch_ops.TorchBackend(
        attention, dtype=dtype, device=DEVICE, kernels=torch_ops.TRITON
    )
    weights = load_llama_weights(checkpoint, backend)
    check(Llama(checkpoint.config, weights, backend, BLOCK))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 16, "num_key_value_heads": 16},
        {"moe_intermediate_size": 128, "num_experts_per_tok": 4, "topk_group": 2},
        {"vocab_size": 2000},
        # Products whose parts take most: out of attention, into the MLP, of token and hidden state.
        {
            "hidden_size": 1024,
            "q_lora_rank": 1024,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
        {"hidden_size": 1024, "intermediate_size": 1024},
        {"hidden_size": 1024},
    ],
    ids=["attention", "experts", "logits", "parts of attention", "parts of mlp", "parts of join"],
)
@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_deepseek(shape: dict[str, Any], fp8: bool, mtp: bool, tmp_path: Path) -> None:
    raw = tiny_config(mtp=True) | shape | {"num_hidden_layers": 2}
    tensors = tiny_tensors(raw)
    write_json_files(tmp_path, raw)
    save_tensors(tmp_path, quantise_fp8(tensors)[0] if fp8 else tensors)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    backend = torch_mla.TorchMlaBackend(
        latent_attention(checkpoint.config, BLOCK, mtp=mtp), dtype="bfloat16", device=DEVICE,
        kernels=torch_mla.TRITON,
    )  # fmt: skip
    weights = load_weights(checkpoint, backend, mtp=mtp, fp8=backend if fp8 else None)
    check(Deepseek(checkpoint.config, weights, backend, BLOCK), mtp=mtp)

"""A tiny DeepSeek-V3 on the Triton kernels: what the torch references give, and the same bits however steps are cut.

Tolerances: float32 through three layers; the references themselves are within 1e-4 of transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.attention import mla_attention, mla_prefill
from headrace_kernels.batch import Batch, DraftBatch
from headrace_kernels.torch_mla import REFERENCE, TRITON, MlaKernels, TorchMlaBackend
from helpers.kernels.e4m3 import NEEDS_E4M3
from helpers.kernels.tensor_backend import floats_of
from helpers.models.tiny_deepseek import tiny_deepseek

pytestmark = pytest.mark.matrix
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4
# As R1, small; and what only a re-expressed SmolLM2 has.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
R1: dict[str, Any] = HEADS | {"num_hidden_layers": 2}
SMOLLM2: dict[str, Any] = HEADS | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 24,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
}
# Sequence, first position and end of the rows of a step.
Rows = tuple[int, int, int]
TOKENS = np.random.default_rng(0).integers(3, 200, (3, 40)).astype(np.int32)
TABLES = np.random.default_rng(1).permutation(36).reshape(3, 12).astype(np.int32)
PROMPT = 17  # tokens of each sequence that are its prompt


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a context of some tens of tokens has several."""
    for module, tile in ((mla_attention, 16), (mla_prefill, 16)):
        monkeypatch.setattr(module, "SPAN", 16)
        monkeypatch.setattr(module, "KV_TILE", tile)


def load(path: Path, kernels: MlaKernels, kv_dtype: str | None = None) -> Deepseek:
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, BLOCK, mtp=True)
    backend = TorchMlaBackend(
        attention, dtype="float32", device=DEVICE, kernels=kernels, kv_dtype=kv_dtype
    )
    weights = load_weights(checkpoint, backend, mtp=True)
    model = Deepseek(checkpoint.config, weights, backend, BLOCK)
    model.allocate_kv(TABLES.size)
    return model


def arrays(work: Sequence[Rows]) -> dict[str, Any]:
    """What a batch of these rows is made of; all logits are wanted."""
    seqs = [seq for seq, _, _ in work]
    row_seqs = np.repeat(seqs, [end - start for _, start, end in work])
    positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in work])
    blocks = TABLES[row_seqs, positions // BLOCK].astype(np.int64)
    starts = [0, *itertools.accumulate(end - start for _, start, end in work)]
    return {
        "tokens": TOKENS[row_seqs, positions],
        "positions": positions,
        "slots": blocks * BLOCK + positions % BLOCK,
        "seq_starts": np.array(starts, np.int32),
        "context_lens": np.array([end for _, _, end in work], np.int32),
        "block_tables": np.ascontiguousarray(TABLES[seqs]),
        "logit_rows": np.arange(len(positions), dtype=np.int32),
    }


def forward(model: Deepseek, work: Sequence[Rows], *, apart: bool = False) -> torch.Tensor:
    """Logits of all rows; `apart`: prompt rows expand keys and values, the others attend absorbed."""
    prompt_lens = np.full(len(work), PROMPT, np.int32) if apart else None
    return floats_of(model.forward(Batch(**arrays(work), prompt_lens=prompt_lens)))


def draft(model: Deepseek, work: Sequence[Rows], hidden_from: list[int]) -> torch.Tensor:
    batch = DraftBatch(
        **arrays(work),
        hidden_from=np.array(hidden_from, np.int32),
        first_keys=np.ones(len(work), np.int32),
        chained=False,
    )
    return floats_of(model.draft(batch))


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(("config", "apart"), [(R1, True), (SMOLLM2, False)], ids=["R1", "SmolLM2"])
def test_logits_are_those_of_the_references(
    config: dict[str, Any], apart: bool, tmp_path: Path
) -> None:
    tiny_deepseek(tmp_path, mtp=True, **config)
    models = [load(tmp_path, kernels) for kernels in (TRITON, REFERENCE)]
    steps = [[(0, 0, 14), (1, 0, 3)], [(0, 14, 19), (1, 3, 4), (2, 0, 1)]]  # past a prompt's end
    for step in steps:
        got, want = (forward(model, step, apart=apart) for model in models)
        assert want.std() > 0.3  # so that the tolerance says something
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    # of the last step: rows 2 and 3 are positions 16 and 17, row 5 is position 3 of the second sequence
    drafted = [draft(model, [(0, 17, 19), (1, 4, 5)], [2, 3, 5]) for model in models]
    torch.testing.assert_close(*drafted, rtol=0, atol=1e-4)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("apart", [False, True])
def test_a_row_has_the_same_bits_alone_in_company_chunked_and_after_a_cached_prefix(
    apart: bool, tmp_path: Path
) -> None:
    model = load(tiny_deepseek(tmp_path, mtp=True, **R1), TRITON)
    company = [(0, 0, 20), (1, 0, 2)]
    together = forward(model, company, apart=apart)
    alone = load(tmp_path, TRITON)
    cuts = [(0, 0, 7), (0, 7, 16), (0, 16, 19), (0, 19, 20)]  # the third has the end of the prompt
    parts = [forward(alone, [cut], apart=apart) for cut in cuts]
    assert torch.equal(torch.cat(parts), together[:20])
    again = forward(alone, [(2, 0, 1), (0, 16, 20)], apart=apart)  # what is before comes from cache
    assert torch.equal(again[1:], together[16:20])
    # a draft takes its hidden state from a row of this pass, or from the tail of the block before
    drafted = draft(alone, [(0, 20, 21)], [4])
    tail = -(int(TABLES[0, 4]) + 1)  # of the block with positions 16 to 19
    forward(alone, [(1, 0, 1)], apart=apart)
    assert torch.equal(draft(alone, [(0, 20, 21)], [tail]), drafted)


@NEEDS_E4M3
def test_an_e4m3_cache_gives_nearly_the_same_logits(tmp_path: Path) -> None:
    tiny_deepseek(tmp_path, mtp=True, **R1)
    work = [(0, 0, 14), (1, 0, 3)]
    narrow, reference, wide = (
        forward(load(tmp_path, kernels, kv_dtype), work)
        for kernels, kv_dtype in (
            (TRITON, "float8_e4m3fn"),
            (REFERENCE, "float8_e4m3fn"),
            (REFERENCE, None),
        )
    )
    # A last bit of float32 may change a rounding to e4m3 here and there, or the choice of an expert.
    assert ((narrow - reference).abs() < 1e-3).float().mean() > 0.9
    # e4m3 has three bits of fraction: a value of the cache is off by up to a sixteenth.
    assert (narrow - wide).norm() < 0.25 * wide.norm()

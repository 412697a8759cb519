"""The head is in memory once: with tied embeddings it is the table, and drafts use the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from headrace.models.deepseek import attention_of as latent_attention
from headrace.models.deepseek_weights import load_weights as load_deepseek
from headrace.models.llama import attention_of
from headrace.models.llama import load_weights as load_llama
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels import torch_mla, torch_ops
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama

BLOCK = 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_of_a_llama_is_its_table(tied: bool, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_llama(tmp_path, tie_word_embeddings=tied))
    backend = torch_ops.TorchBackend(
        attention_of(checkpoint.config, BLOCK), dtype="bfloat16", device="cpu", kernels=torch_ops.REFERENCE
    )  # fmt: skip
    weights = load_llama(checkpoint, backend)
    shared = weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    assert shared == tied
    assert weights.head.bias is None


@pytest.mark.parametrize("tied", [True, False])
def test_drafts_of_deepseek_use_the_head_of_the_model(tied: bool, tmp_path: Path) -> None:
    path = tiny_deepseek(tmp_path, mtp=True, tie_word_embeddings=tied)
    checkpoint = SafetensorsCheckpoint(path)
    attention = latent_attention(checkpoint.config, BLOCK, mtp=True)
    backend = torch_mla.TorchMlaBackend(
        attention, dtype="bfloat16", device="cpu", kernels=torch_mla.REFERENCE
    )
    weights = load_deepseek(checkpoint, backend, mtp=True)
    assert weights.mtp is not None
    assert weights.mtp.head is weights.head
    assert (weights.head.weight.data_ptr() == weights.embedding.data_ptr()) == tied
    native = load_deepseek(checkpoint, TensorBackend(attention, dtype="float32"), mtp=True)
    assert native.mtp is not None
    assert native.mtp.head is native.head

"""What only the torch backend of DeepSeek-V3 has: an FP8 cache, prompts by expanded keys, products of FP8 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models import Batch
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.ops import Results
from headrace_kernels.torch_mla import REFERENCE, TorchMlaBackend
from helpers.models.deepseek_oracle import build, build_mtp, expected, prompt
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import quantise_fp8, save_tensors, tiny_config, tiny_tensors
from helpers.models.tiny_model import write_json_files

torch.set_num_threads(1)

BLOCK = 16


def torch_model(path: Path, *, mtp: bool = False, fp8: bool = False, **options: Any) -> Deepseek:
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, BLOCK, mtp=mtp)
    made: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kernels": REFERENCE, **options}
    backend = TorchMlaBackend(attention, **made)
    weights = load_weights(checkpoint, backend, mtp=mtp, fp8=backend if fp8 else None)
    return Deepseek(checkpoint.config, weights, backend, BLOCK)


def test_an_fp8_cache_stays_close_and_takes_a_quarter(tmp_path: Path) -> None:
    build_mtp(tmp_path)
    exact = Drafter(Stepper(torch_model(tmp_path, mtp=True), BLOCK))
    small = Drafter(Stepper(torch_model(tmp_path, mtp=True, kv_dtype="float8_e4m3fn"), BLOCK))
    tokens = prompt(60)
    main, draft = exact.step([(exact.stepper.stream(tokens), 60)])
    stream = small.stepper.stream(tokens)
    steps = [small.step([(stream, n)]) for n in (40, 19, 1)]
    for found, wanted in ((0, main[0]), (1, draft[0])):
        error = (torch.cat([step[found][0] for step in steps]) - wanted).abs()
        # e4m3 has 3 bits of mantissa: a few per cent of the spread of the logits in most rows.
        assert 0.001 < error.mean() / wanted.std() < 0.1
    models = exact.stepper.model, small.stepper.model
    entries = [model.kv_block_bytes - 4 * 64 for model in models]  # without the hidden tail
    assert entries == [4 * BLOCK * 40 * 4, 4 * BLOCK * 40]
    assert models[0].kv_layout != models[1].kv_layout
    pool = models[1].kv_pool()
    assert sum(r.nbytes for group in pool.groups for r in group) == pool.block_bytes


def test_blocks_of_an_fp8_cache_can_be_copied(tmp_path: Path) -> None:
    build_mtp(tmp_path)
    model = torch_model(tmp_path, mtp=True, kv_dtype="float8_e4m3fn")
    drafts = Drafter(Stepper(model, BLOCK))
    tokens = prompt(60)
    first = drafts.stepper.stream(tokens)
    whole, whole_drafts = drafts.step([(first, 60)])
    copied = drafts.stepper.stream(tokens, cached=48)
    drafts.stepper.reserve(copied, 48)
    for group in model.kv_pool().groups:
        for region in group:
            memory: Any = region.memory
            for a, b in zip(first.blocks, copied.blocks, strict=False):
                at, to = region.offset + a * region.stride, region.offset + b * region.stride
                memory[to : to + region.nbytes] = memory[at : at + region.nbytes]
    main, draft = drafts.step([(copied, 12)])
    torch.testing.assert_close(main[0], whole[0][48:], rtol=0, atol=1e-5)
    torch.testing.assert_close(draft[0], whole_drafts[0][47:], rtol=0, atol=1e-5)


class Prompted:
    """A model that is told of each sequence that its first `prompt_len` tokens are prompt."""

    def __init__(self, model: Deepseek, prompt_len: int) -> None:
        self.allocate_kv = model.allocate_kv
        self.config = model.config
        self._model, self._prompt_len = model, prompt_len

    def forward(self, batch: Batch) -> Results:
        batch.prompt_lens = np.full(batch.seqs, self._prompt_len, np.int32)
        return self._model.forward(batch)


@pytest.mark.parametrize("prompt_len", [1, 35, 48, 90])
def test_prompt_rows_with_expanded_keys_equal_transformers(prompt_len: int, tmp_path: Path) -> None:
    oracle = build(tmp_path)
    told: Any = Prompted(torch_model(tmp_path), prompt_len)
    stepper = Stepper(told, BLOCK)
    tokens, other = prompt(90), prompt(60, seed=2)
    streams = [stepper.stream(tokens), stepper.stream(other)]
    done = [stepper.step([(streams[0], n), (streams[1], m)]) for n, m in ((40, 1), (50, 59))]
    for i, wanted in enumerate((tokens, other)):
        found = torch.cat([step[i] for step in done])
        torch.testing.assert_close(found, expected(oracle, wanted), rtol=0, atol=1e-4)


def test_products_of_fp8_weights_stay_close_to_the_dequantised(tmp_path: Path) -> None:
    raw = tiny_config() | {"hidden_size": 160, "moe_intermediate_size": 72, "q_lora_rank": 130}
    stored, worth = quantise_fp8(tiny_tensors(raw))
    for name, tensors in (("fp8", stored), ("float", worth)):
        write_json_files(tmp_path / name, raw)
        save_tensors(tmp_path / name, tensors)
    tokens = [token % raw["vocab_size"] for token in prompt(40)]
    wanted = Stepper(torch_model(tmp_path / "float"), BLOCK).whole(tokens)
    found = Stepper(torch_model(tmp_path / "fp8", fp8=True), BLOCK).whole(tokens)
    error = (found - wanted).abs().amax(-1) / wanted.std()
    assert 0.001 < error.median() < 0.5  # activations are rounded to e4m3 before every product

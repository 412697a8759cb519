"""A DeepSeek in a folder: mapped it computes the same bits, also of drafts, and what is not its is refused."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import _core
from headrace.models.deepseek import Deepseek, attention_of
from headrace.models.deepseek_weights import load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.survey import Survey
from headrace_kernels.ops import MlaAttention
from headrace_kernels.packed import WEIGHTS, PackedBackend, PackedError, PackingBackend
from helpers.kernels.tensor_backend import TensorBackend
from helpers.models.deepseek_oracle import load
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import (
    FP8,
    quantise_fp8,
    save_tensors,
    tiny_config,
    tiny_deepseek,
    tiny_tensors,
)
from helpers.models.tiny_model import write_json_files

torch.set_num_threads(1)

DTYPES = ["float32", "bfloat16", "float16", "int8"]
BLOCK = 16
SHAPES: dict[str, dict[str, Any]] = {
    "as R1": {},
    "no nope, plain queries, tied": {
        "qk_nope_head_dim": 0,
        "q_lora_rank": None,
        "tie_word_embeddings": True,
        "n_shared_experts": 0,
    },
    "odd sizes, biases": {
        "hidden_size": 44,
        "intermediate_size": 70,
        "moe_intermediate_size": 19,
        "kv_lora_rank": 27,
        "qk_nope_head_dim": 10,
        "attention_bias": True,
    },
}


class Mapped(TensorBackend, PackedBackend):
    """What is in a folder, with results as tensors."""


def attention(checkpoint: SafetensorsCheckpoint) -> MlaAttention:
    return attention_of(checkpoint.config, BLOCK, mtp=True)


def packed(checkpoint: SafetensorsCheckpoint, folder: Path, dtype: str) -> Path:
    folder.mkdir()
    backend = PackingBackend(attention(checkpoint), dtype=dtype, folder=folder)
    load_weights(checkpoint, backend, mtp=True)
    backend.finish()
    return folder


def mapped(checkpoint: SafetensorsCheckpoint, folder: Path, dtype: str) -> Deepseek:
    backend = Mapped(attention(checkpoint), dtype=dtype, folder=folder)
    weights = load_weights(Survey(checkpoint), backend, mtp=True)
    return Deepseek(checkpoint.config, weights, backend, BLOCK)


def steps(deepseek: Deepseek) -> list[torch.Tensor]:
    """Logits and drafts of a prompt in two chunks."""
    drafter = Drafter(Stepper(deepseek, BLOCK, blocks=8))
    stream = drafter.stepper.stream(np.random.default_rng(3).integers(3, 250, 40).tolist())
    chunks = [drafter.step([(stream, 17)]), drafter.step([(stream, 20)])]
    return [rows for main, drafts in chunks for rows in (*main, *drafts)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_computes_the_same_bits(dtype: str, shape: str, tmp_path: Path) -> None:
    tiny_deepseek(tmp_path / "tiny", mtp=True, fused="odd" in shape, **SHAPES[shape])
    checkpoint = SafetensorsCheckpoint(tmp_path / "tiny")
    wanted = steps(load(tmp_path / "tiny", "native", block_tokens=BLOCK, dtype=dtype, mtp=True))
    folder = packed(checkpoint, tmp_path / "packed", dtype)
    there = mapped(checkpoint, folder, dtype)
    (folder / WEIGHTS).unlink()  # whoever has it mapped keeps it
    found = steps(there)
    assert len(found) == len(wanted) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_fp8_is_packed_as_what_it_is_worth(tmp_path: Path) -> None:
    raw = tiny_config(mtp=True)
    stored, worth = quantise_fp8(tiny_tensors(raw))
    for name, tensors, config in (
        ("fp8", stored, {"quantization_config": FP8}),
        ("float", worth, {}),
    ):
        write_json_files(tmp_path / name, raw | config)
        save_tensors(tmp_path / name, tensors)
    checkpoint = SafetensorsCheckpoint(tmp_path / "fp8")
    found = steps(mapped(checkpoint, packed(checkpoint, tmp_path / "packed", "int8"), "int8"))
    wanted = steps(load(tmp_path / "float", "native", block_tokens=BLOCK, dtype="int8", mtp=True))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"qk_nope_head_dim": 8, "v_head_dim": 24},  # the same tensors, cut elsewhere
        {"moe_intermediate_size": 40},
        {"n_routed_experts": 16},
        {"first_k_dense_replace": 2},
        {"num_hidden_layers": 4},
        {"n_shared_experts": 0},
    ],
)
def test_another_model_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "tiny", mtp=True))
    folder = packed(checkpoint, tmp_path / "packed", "int8")
    other = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "other", mtp=True, **change))
    with pytest.raises(PackedError, match=r"item \d+ is .*, expected \{'"):
        mapped(other, folder, "int8")


def test_a_slot_of_mapped_experts_is_overwritten_in_a_copy(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "tiny", mtp=True))
    folder = packed(checkpoint, tmp_path / "packed", "int8")
    before = (folder / WEIGHTS).read_bytes()
    there, beside = mapped(checkpoint, folder, "int8"), mapped(checkpoint, folder, "int8")
    wanted = steps(beside)
    layer = there.expert_layers[0].experts
    layer.write_slot(1, layer.read_slot(0))  # type: ignore[union-attr]
    assert (folder / WEIGHTS).read_bytes() == before
    assert not torch.equal(steps(there)[0], wanted[0])
    again = mapped(checkpoint, folder, "int8")
    assert all(torch.equal(a, b) for a, b in zip(steps(again), wanted, strict=True))


def test_slots_are_taken_once() -> None:
    one = [(np.ones((8, 64), np.float32), "float32")]
    slots = _core.Slots(one, [(np.ones((64, 4), np.float32), "float32")], (1, 64), "float32")
    how: dict[str, Any] = {
        "top_k": 1,
        "groups": 1,
        "top_groups": 1,
        "normalise": True,
        "scale": 1.0,
    }
    gate = np.ones((1, 64), np.float32)
    assert len(slots.image(0)) == 32 * 64 * 4
    with pytest.raises(ValueError, match="no part 4"):
        slots.image(slots.parts)
    _core.Experts(gate, [0.0], slots, **how)
    for use in (lambda: _core.Experts(gate, [0.0], slots, **how), lambda: slots.image(0)):
        with pytest.raises(ValueError, match="a layer has these experts already"):
            use()


def test_images_are_what_they_were() -> None:
    """Whoever changes what is packed raises `packed.FORMAT`, and then these sums."""
    rows = (np.arange(70 * 130, dtype=np.float32).reshape(70, 130) % 257 - 128) / np.float32(64)
    halves = [(rows[:10], "float32")] * 2, [(rows[:, :5].repeat(2, 0)[:130], "float32")] * 2
    sums: dict[str, list[str]] = {}
    for dtype in DTYPES:
        heads = _core.HeadMatrices(rows, "float32", dtype, heads=2, nope_dim=20, v_dim=15)
        slots = _core.Slots(*halves, (2, 130), dtype)
        parts = np.concatenate([slots.image(part) for part in range(slots.parts)])
        images = (heads.image(), parts)
        sums[dtype] = [hashlib.sha256(image.tobytes()).hexdigest()[:16] for image in images]
    assert sums == IMAGES


IMAGES = {
    "float32": ["82166e5dba0f1287", "cc932786eee94861"],
    "bfloat16": ["209c7eedf55d505f", "bf3d6a09840248f0"],
    "float16": ["8eef6730a3904f5c", "390b9532f0ee7ff4"],
    "int8": ["acce17b1c9ea28e6", "ebd38bf6d2cfbfd8"],
}


def test_images_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1 << 16))
    with (tmp_path / "x").open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for size in ({"count": 0}, {"hidden": 0}, {"width": 0}, {"count": 2**62}, {"width": 2**63}):
        shape = {"count": 1, "hidden": 64, "width": 4} | size
        with pytest.raises(ValueError, match=r"matrices|ends behind"):
            _core.Slots.mapped(buffer, 0, dtype="int8", **shape)
    for size in ({"heads": 0}, {"v_dim": 2**60}, {"kv_lora_rank": 0}, {"nope_dim": 2**60}):
        heads = {"heads": 1, "nope_dim": 4, "v_dim": 4, "kv_lora_rank": 8} | size
        with pytest.raises(ValueError, match=r"matrices|ends behind"):
            _core.HeadMatrices.mapped(buffer, 0, dtype="int8", **heads)


def test_parts_of_another_shape_are_refused_one_by_one(tmp_path: Path) -> None:
    """Where nothing that comes before tells the two apart."""
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "tiny"))
    latent = attention(checkpoint)
    kv_b = np.ones((latent.heads, latent.nope_dim + latent.v_dim, latent.kv_lora_rank), np.float32)
    gate_up, down = np.ones((64, 64), np.float32), np.ones((64, 32), np.float32)
    packing = PackingBackend(latent, dtype="int8", folder=tmp_path)
    packing.head_matrices(kv_b)
    packing.slots([gate_up], [down], (1, 64))
    packing.finish()
    cut = replace(latent, nope_dim=latent.nope_dim - 8, v_dim=latent.v_dim + 8)
    with pytest.raises(PackedError, match="item 0 is"):
        PackedBackend(cut, dtype="int8", folder=tmp_path).head_matrices(kv_b)
    for first, second, count in (
        (gate_up[:32], down, 1),
        (gate_up, down[:, :16], 1),
        (gate_up, down, 2),
    ):
        mapped = PackedBackend(latent, dtype="int8", folder=tmp_path)
        mapped.head_matrices(kv_b)
        with pytest.raises(PackedError, match="item 1 is"):
            mapped.slots([first], [second], (count, 64))

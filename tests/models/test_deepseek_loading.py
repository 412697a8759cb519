"""How DeepSeek-V3 checkpoints are read: experts single or stacked, FP8, shards, parts for a rank, and every fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models import UnsupportedModelError, load_model
from headrace.models.config import ModelFileError
from headrace.models.deepseek_weights import Share, load_weights
from headrace.models.fp8 import Scaled
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import HostArray
from helpers.models.deepseek_oracle import BackendName, load, prompt
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import (
    FP8,
    Tensors,
    fuse_experts,
    quantise_fp8,
    save_tensors,
    tiny_config,
    tiny_deepseek,
    tiny_tensors,
)
from helpers.models.tiny_model import tiny_llama, write_json_files

torch.set_num_threads(1)

BLOCK = 16
BACKENDS: list[BackendName] = ["native", "reference"]
# Blocks of 128 that are whole, partial, and with the seam of gate and up in their middle.
WIDE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 256,
    "moe_intermediate_size": 72,
    "q_lora_rank": 130,
    "kv_lora_rank": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def save(path: Path, raw: dict[str, Any], tensors: Tensors, files: int = 1) -> Path:
    write_json_files(path, raw)
    save_tensors(path, tensors, files)
    return path


def logits(path: Path, backend: BackendName) -> torch.Tensor:
    model = load(path, backend, block_tokens=BLOCK)
    return Stepper(model, BLOCK).whole([token % model.vocab_size for token in prompt(40)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stacked", [False, True])
def test_fp8_equals_its_dequantised_weights(
    stacked: bool, backend: BackendName, tmp_path: Path
) -> None:
    raw = tiny_config() | WIDE
    stored, worth = quantise_fp8(tiny_tensors(raw, fused=stacked))
    scales = [name for name in stored if name.endswith("_scale_inv")]
    assert len(scales) == (28 if stacked else 48)
    quantised = save(tmp_path / "fp8", raw | {"quantization_config": FP8}, stored, files=3)
    found = logits(quantised, backend)
    assert torch.equal(found, logits(save(tmp_path / "float", raw, worth), backend))
    assert not torch.equal(
        found, logits(save(tmp_path / "before", raw, tiny_tensors(raw)), backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_stacked_and_single_experts_are_one_model(backend: BackendName, tmp_path: Path) -> None:
    raw = tiny_config()
    single = tiny_tensors(raw)
    found = logits(save(tmp_path / "stacked", raw, fuse_experts(single), files=2), backend)
    assert torch.equal(found, logits(save(tmp_path / "single", raw, single), backend))


def test_bfloat16_weights_are_read(tmp_path: Path) -> None:
    raw = tiny_config() | {"torch_dtype": "bfloat16"}
    narrow = {name: x.bfloat16() for name, x in tiny_tensors(raw).items()}
    wide = {name: x.float() for name, x in narrow.items()}
    found = logits(save(tmp_path / "narrow", raw, narrow), "reference")
    assert torch.equal(found, logits(save(tmp_path / "wide", raw, wide), "reference"))


class Recorder:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.matrices: list[list[HostArray]] = []
        self.kv_b: list[HostArray] = []
        self.gate_up: list[list[HostArray]] = []
        self.dispatches: list[object] = []

    def matrix(self, parts: Sequence[HostArray], bias: object = None) -> None:  # noqa: ARG002
        self.matrices.append(list(parts))

    def vector(self, x: HostArray) -> None: ...

    def table(self, x: HostArray) -> None: ...

    def head_matrices(self, kv_b: HostArray) -> None:
        self.kv_b.append(kv_b)

    def experts(
        self,
        gate: HostArray,
        bias: HostArray,
        gate_up: Sequence[HostArray],
        down: Sequence[HostArray],
        routing: object,  # noqa: ARG002
        *,
        shared: object,  # noqa: ARG002
        dispatch: object,
    ) -> None:
        assert len(gate) == len(bias) == 8  # every rank routes among all
        self.gate_up.append([*gate_up, *down])
        self.dispatches.append(dispatch)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rank_reads_its_share_and_no_more(stacked: bool, tmp_path: Path) -> None:
    raw = tiny_config()
    tensors = tiny_tensors(raw)
    path = save(tmp_path, raw, fuse_experts(tensors) if stacked else tensors)
    checkpoint = SafetensorsCheckpoint(path)
    backend: Any = Recorder()
    read: list[int] = []
    checkpoint.progress = lambda done, _: read.append(done)
    # Two lists of experts in any order, unlike in the two layers; 5 has a replica.
    first = LayerPlacement(8, ((5, 2), (7, 1, 0, 3, 4, 6, 5)))
    layers = {1: first, 2: LayerPlacement.even(8, 2)}
    share = Share(rank=0, layers=layers, dispatch=lambda placement: (placement, "a dispatch"))  # type: ignore[arg-type,return-value]
    load_weights(checkpoint, backend, share=share)

    def half(layer: int, expert: int, *names: str) -> torch.Tensor:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        return torch.cat([tensors[f"{prefix}{name}.weight"] for name in names])

    for got, layer, experts in zip(backend.gate_up, (1, 2), ((5, 2), (0, 1, 2, 3)), strict=True):
        want = [half(layer, e, "gate_proj", "up_proj") for e in experts]
        want += [half(layer, e, "down_proj") for e in experts]
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(got, want, strict=True))
    assert backend.dispatches == [(layers[1], "a dispatch"), (layers[2], "a dispatch")]
    # The last call says that all is done; the one before, what was read.
    expert = 3 * 32 * 64
    assert checkpoint.nbytes - read[-2] == 4 * expert * (6 + 4)
    assert read[-1] == checkpoint.nbytes


def test_fp8_stays_fp8_where_the_backend_can(tmp_path: Path) -> None:
    raw = tiny_config() | WIDE | {"attention_bias": True}
    for stacked in (False, True):
        tensors = tiny_tensors(raw, fused=stacked)
        stored, _ = quantise_fp8(tensors)
        path = save(tmp_path / str(stacked), raw | {"quantization_config": FP8}, stored)

        class Keeper(Recorder):
            def __init__(self) -> None:
                super().__init__()
                self.scaled: list[list[Scaled]] = []
                self.biases = 0

            def fp8_matrix(self, parts: Sequence[Scaled], bias: HostArray | None = None) -> None:
                self.scaled.append(list(parts))
                self.biases += bias is not None

            def fp8_experts(self, gate: HostArray, *rest: Any, **_: Any) -> None:
                _, gate_up, down, _ = rest
                assert len(gate) == 4  # every rank routes among all
                for e in range(len(gate_up)):
                    self.scaled += [gate_up[e], down[e]]

        backend: Any = Keeper()
        load_weights(SafetensorsCheckpoint(path), backend, fp8=backend)
        found = [part for parts in backend.scaled for part in parts]
        kept = {name for name in stored if name.endswith("_scale_inv") and "kv_b" not in name}
        experts = 4 * 2 * 2 - 2 * 2 if stacked else 0  # layers of stacked ones count once a name
        assert len(found) == len(kept) + experts
        assert all(part.weight.dtype.name == "float8_e4m3fn" for part in found)
        assert backend.biases == 6
        assert len(backend.kv_b) == 3  # absorbed: no matrix of rows
        qkv_a = backend.scaled[1 if raw["q_lora_rank"] else 0]
        assert [tuple(part.weight.shape) for part in qkv_a] == [(130, 160), (72, 160)]
        assert [tuple(part.scale_inv.shape) for part in qkv_a] == [(2, 2), (1, 2)]


def spoil(tensors: Tensors, change: str) -> Tensors:
    prefix = "model.layers.1."
    match change:
        case "router":
            del tensors[prefix + "mlp.gate.weight"]
        case "bias":
            del tensors[prefix + "mlp.gate.e_score_correction_bias"]
        case "expert":
            del tensors[prefix + "mlp.experts.5.up_proj.weight"]
        case "expert shape":
            tensors[prefix + "mlp.experts.5.up_proj.weight"] = torch.zeros(31, 64)
        case "kv_b":
            tensors[prefix + "self_attn.kv_b_proj.weight"] = torch.zeros(127, 32)
        case "q":
            tensors = {n.replace("q_a_proj", "q_proj"): x for n, x in tensors.items()}
        case "shared":
            del tensors[prefix + "mlp.shared_experts.down_proj.weight"]
        case "integers":
            tensors[prefix + "mlp.gate.weight"] = torch.zeros(8, 64, dtype=torch.int8)
        case "fp8":
            name = prefix + "self_attn.o_proj.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        case "stack":
            tensors = fuse_experts(tensors)
            name = prefix + "mlp.experts.gate_up_proj"
            tensors[name] = tensors[name][:7].clone()
        case _:
            tensors = fuse_experts(tensors)
            del tensors[prefix + "mlp.experts.down_proj"]
    return tensors


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("router", r"tensor 'model.layers.1.mlp.gate.weight' is missing"),
        ("bias", r"layers.1.mlp.gate.e_score_correction_bias' is missing"),
        ("expert", r"layers.1.mlp.experts.5.up_proj.weight' is missing"),
        ("expert shape", r"experts.5.up_proj.weight: expected shape \[32, 64\], found \[31, 64\]"),
        ("kv_b", r"kv_b_proj.weight: expected shape \[128, 32\], found \[127, 32\]"),
        ("q", r"self_attn.q_a_proj.weight' is missing"),
        ("shared", r"shared_experts.down_proj.weight' is missing"),
        ("integers", r"gate.weight: expected a floating-point dtype, found int8"),
        ("fp8", r"o_proj.weight: expected its scales as .*o_proj.weight_scale_inv, which is miss"),
        ("stack", r"gate_up_proj: expected shape \[8, 64, 64\], found \[7, 64, 64\]"),
        ("half a stack", r"layers.1.mlp.experts.down_proj' is missing"),
    ],
)
def test_a_broken_checkpoint_is_named(change: str, text: str, tmp_path: Path) -> None:
    raw = tiny_config()
    path = save(tmp_path, raw, spoil(tiny_tensors(raw), change))
    with pytest.raises(CheckpointError, match=text):
        load(path, "reference", block_tokens=BLOCK)


def test_a_cache_in_fp8_is_for_gpus_and_deepseek(tmp_path: Path) -> None:
    for path, text in (
        (tiny_deepseek(tmp_path / "deepseek"), "on the CPU it is float32"),
        (tiny_llama(tmp_path / "llama"), "not supported by llama"),
    ):
        with pytest.raises(UnsupportedModelError, match=text):
            load_model(
                SafetensorsCheckpoint(path),
                dtype="auto",
                device="cpu",
                block_tokens=BLOCK,
                kv_dtype="fp8",
            )


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    raw = tiny_config()
    path = save(tmp_path, raw, tiny_tensors(raw), files=3)
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        ModelFileError, match=r"model-00002-of-00003.safetensors: .*not fully covered"
    ):
        load(path, "reference", block_tokens=BLOCK)


def test_reading_is_told_of_to_the_end(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path / "tiny", mtp=True, fused=True))
    seen: list[tuple[int, int]] = []
    checkpoint.progress = lambda done, total: seen.append((done, total))
    backend: Any = Recorder()
    load_weights(checkpoint, backend)  # without the layer that drafts
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)

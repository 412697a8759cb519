"""A checkpoint is checked whole before anything of it is read, also one of DeepSeek-R1's size."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.random_checkpoint import R1_CONFIG
from headrace.models.deepseek import load_deepseek
from headrace.models.deepseek_weights import Share, load_weights
from headrace.models.load.checkpoint import Checkpoint, CheckpointError, SafetensorsCheckpoint
from headrace.models.load.survey import SurveyBackend, names_read, survey
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.ops import HostArray
from helpers.kernels.expert_ranks import random_placement
from helpers.models.tiny_deepseek import deepseek_shapes, tiny_deepseek
from helpers.models.tiny_model import tiny_tokenizer, write_json_files

SHARDS = 163
R1_LAYERS = 61
FEW_LAYERS = 5  # three dense ones as R1's, and two with R1's 256 experts
R1: dict[str, Any] = R1_CONFIG | {
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4, "I8": 1}
Layout = dict[str, tuple[str, tuple[int, ...]]]


def r1_layout(layers: int = R1_LAYERS) -> Layout:
    """Names, dtypes and shapes of the published checkpoint, 91,991 tensors, or of its first layers."""
    layout: Layout = {}
    for name, shape in deepseek_shapes(R1 | {"num_hidden_layers": layers}).items():
        if name.endswith("e_score_correction_bias"):
            layout[name] = ("F32", shape)
            continue
        kept = ("norm", "mlp.gate.", "embed_tokens", "lm_head", "eh_proj")
        if any(part in name for part in kept):
            layout[name] = ("BF16", shape)
            continue
        layout[name] = ("F8_E4M3", shape)
        layout[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // 128), -(-shape[1] // 128)))
    # The layer that drafts comes with copies of the embedding and the head.
    for copied in ("embed_tokens", "shared_head.head"):
        layout[f"model.layers.{layers}.{copied}.weight"] = ("BF16", (129_280, 7168))
    return layout


def write_sparse(path: Path, layout: Layout, layers: int = R1_LAYERS) -> Path:
    """Files of the true lengths without a byte of data, and their index."""
    write_json_files(path, R1 | {"num_hidden_layers": layers})
    vocab = json.dumps(tiny_tokenizer())
    (path / "tokenizer.json").write_text(vocab)
    names = list(layout)
    starts = [number * len(names) // SHARDS for number in range(SHARDS + 1)]
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        shard = f"model-{number + 1:05}-of-{SHARDS:06}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for name in names[starts[number] : starts[number + 1]]:
            dtype, shape = layout[name]
            end = at + ITEM_BYTES[dtype] * torch.Size(shape).numel()
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            weight_map[name] = shard
            at = end
        text = json.dumps(header).encode()
        with (path / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def check(checkpoint: Checkpoint, *, fp8: bool) -> list[str]:
    def load(surveyed: Checkpoint, nothing: SurveyBackend) -> object:
        keeps: Any = nothing
        return load_weights(surveyed, keeps, mtp=True, fp8=keeps if fp8 else None)

    return survey(checkpoint, load)


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("r1"), r1_layout())


@pytest.fixture(scope="module")
def layers(pytestconfig: pytest.Config) -> int:
    """Of the checkpoint, where it need not be whole: what is asserted of a layer holds for each."""
    return R1_LAYERS if pytestconfig.option.all_cases else FEW_LAYERS


@pytest.fixture(scope="module")
def deep(layers: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("deep"), r1_layout(layers), layers)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("fp8", [True, False])
def test_the_layout_of_r1_passes_without_a_byte_of_data(r1: Path, fp8: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = SafetensorsCheckpoint(r1)
    assert len(checkpoint.infos) == 91_991
    assert checkpoint.nbytes > 680e9
    names = check(checkpoint, fp8=fp8)
    assert len(names) == len(set(names)) == 91_991 - 2  # the copies
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    # 92,000 names with their places; what a layer's tensors alone take is 11 GB.
    assert grown_mib < 300


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(
    ("ranks", "most_gb"),
    [(8, {R1_LAYERS: 106, FEW_LAYERS: 11}), (32, {R1_LAYERS: 46, FEW_LAYERS: 8})],
    ids=["8 ranks", "32 ranks"],
)
def test_a_rank_of_r1_reads_its_experts_and_what_all_ranks_hold(
    deep: Path, layers: int, ranks: int, most_gb: dict[int, float], fp8: bool
) -> None:
    checkpoint = SafetensorsCheckpoint(deep)
    # Lists that differ by layer; 32 ranks have 288 slots, so some experts are on two of them.
    placements = {
        layer: random_placement(256, ranks, spare=ranks if ranks == 32 else 0, seed=layer)
        for layer in range(3, layers + 1)
    }

    def of_rank(rank: int) -> list[str]:
        share = Share(rank=rank, layers=placements, dispatch=unused)

        def load(surveyed: Checkpoint, nothing: SurveyBackend) -> object:
            keeps: Any = nothing
            return load_weights(surveyed, keeps, mtp=True, fp8=keeps if fp8 else None, share=share)

        return names_read(checkpoint, load)

    read = [set(of_rank(rank)) for rank in range(0, ranks, 1 if ranks == 8 else 4)]
    everywhere = set.intersection(*read)
    assert not any(".experts." in name for name in everywhere)
    for rank, names in zip(range(0, ranks, ranks // 8), read, strict=True):
        found = {name for name in names if ".experts." in name}
        held = {
            f"model.layers.{layer}.mlp.experts.{expert}.{half}_proj.weight{suffix}"
            for layer, placement in placements.items()
            for expert in placement.ranks[rank]
            for half in ("gate", "up", "down")
            for suffix in ("", "_scale_inv")
        }
        assert found == held
        assert sum(checkpoint.infos[name].nbytes for name in names) < most_gb[layers] * 1e9
    if ranks == 8:
        assert set.union(*read) == set(check(checkpoint, fp8=fp8))


def test_of_stacked_experts_nothing_is_read_ahead_but_what_is_read_whole(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(tiny_deepseek(tmp_path, mtp=True, fused=True))
    placement = LayerPlacement.even(8, 2)

    def names_of(share: Share | None) -> set[str]:
        def load(surveyed: Checkpoint, nothing: SurveyBackend) -> object:
            keeps: Any = nothing
            return load_weights(surveyed, keeps, mtp=True, share=share)

        return set(names_read(checkpoint, load))

    share = Share(rank=1, layers=dict.fromkeys((1, 2, 3), placement), dispatch=unused)
    stacks = {name for name in checkpoint.names() if ".experts." in name}
    assert len(stacks) == 3 * 2
    assert names_of(None) == set(checkpoint.names())
    assert names_of(share) == set(checkpoint.names()) - stacks


def unused(placement: LayerPlacement) -> Any:
    """Nothing is sent while names are gathered."""
    return placement


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"q_lora_rank": None, "attention_bias": True},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"mtp_draft_vocab_size": 20},
        {"n_shared_experts": 0},
    ],
    ids=str,
)
def test_every_form_of_a_checkpoint_is_read_as_surveyed(
    change: dict[str, Any], stacked: bool, tmp_path: Path
) -> None:
    folder = tiny_deepseek(tmp_path, mtp=True, fused=stacked, **change)
    checkpoint = SafetensorsCheckpoint(folder)
    read: list[str] = []
    load_one = checkpoint._load  # pyright: ignore[reportPrivateUsage]

    def noted(name: str) -> HostArray:
        read.append(name)
        return load_one(name)

    names = check(checkpoint, fp8=False)
    checkpoint._load = noted  # pyright: ignore[reportPrivateUsage]
    load_deepseek(
        checkpoint, dtype="auto", device="cpu", block_tokens=16, mtp=True, kv_dtype="auto"
    )
    assert set(names) == set(read) == set(checkpoint.names())


EXPERT = "model.layers.4.mlp.experts.255.up_proj.weight"


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({EXPERT: None}, rf"tensor '{EXPERT}' is missing"),
        ({f"{EXPERT}_scale_inv": None}, rf"{EXPERT}: expected its scales as .*_scale_inv, which is missing"),
        ({EXPERT: ("F8_E4M3", (2048, 7167))}, rf"{EXPERT}: expected shape \[2048, 7168\], found \[2048, 7167\]"),
        ({f"{EXPERT}_scale_inv": ("F32", (16, 55))}, r"_inv: expected float32 \[16, 56\] .* found float32 \[16, 55\]"),
        ({f"{EXPERT}_scale_inv": ("BF16", (16, 56))}, r"_scale_inv: expected float32 \[16, 56\] .* found bfloat16"),
        ({EXPERT: ("I8", (2048, 7168))}, rf"{EXPERT}: expected a floating-point dtype, found int8"),
        (
            {"model.layers.4.mlp.experts.256.up_proj.weight": ("F8_E4M3", (2048, 7168))},
            r"'model.layers.4.mlp.experts.256.up_proj.weight' is no tensor of this model",
        ),
        ({"model.layers.3.self_attn.k_proj.weight": ("BF16", (1, 1))}, r"k_proj.weight' is no tensor of this model"),
        ({"model.norm.weight": ("BF16", (7169,))}, r"model.norm.weight: expected shape \[7168\], found \[7169\]"),
    ],
    ids=["missing", "no scale", "shape", "scale shape", "scale dtype", "dtype", "extra", "extra kind", "norm"],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    change: dict[str, tuple[str, tuple[int, ...]] | None], why: str, tmp_path: Path
) -> None:
    layout = r1_layout(FEW_LAYERS)
    for name, entry in change.items():
        if entry is None:
            del layout[name]
        else:
            layout[name] = entry
    checkpoint = SafetensorsCheckpoint(write_sparse(tmp_path, layout, FEW_LAYERS))
    with pytest.raises(CheckpointError, match=why):
        check(checkpoint, fp8=True)


def test_an_index_that_names_another_shard_is_refused(deep: Path, tmp_path: Path) -> None:
    for file in deep.iterdir():
        (tmp_path / file.name).symlink_to(file)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"][EXPERT] = f"model-00001-of-{SHARDS:06}.safetensors"
    index.unlink()
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"00001-of-.*tensor '{EXPERT}' is missing"):
        SafetensorsCheckpoint(tmp_path)
    missing = f"model-00163-of-{SHARDS:06}.safetensors"
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=f"1 of {SHARDS} shards are missing: {missing}"):
        SafetensorsCheckpoint(tmp_path)

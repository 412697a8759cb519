"""A whole model on the ranks of a group, each with sequences of its own: the logits of one rank, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models import on_cpu
from headrace.models.deepseek import Deepseek, load_deepseek
from headrace.models.deepseek_weights import Share
from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace_kernels.moe.all_to_all import AllToAll
from headrace_kernels.moe.dispatch import Combine
from headrace_kernels.moe.placement import LayerPlacement
from helpers.kernels.expert_ranks import Threads, ThreadTransport, random_placement
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import (
    quantise_fp8,
    save_tensors,
    tiny_config,
    tiny_deepseek,
    tiny_tensors,
)
from helpers.models.tiny_model import write_json_files

BLOCK, EXPERTS = 16, 8
CPU = torch.device("cpu")


def tokens(rank: int, vocab_size: int) -> list[int]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(vocab_size, (20 + 3 * rank,), generator=draw).tolist()


def loaded(path: Path, share: Share | None = None, dtype: Any = "float32") -> Deepseek:
    return load_deepseek(
        SafetensorsCheckpoint(path),
        dtype=dtype,
        device="cpu",
        block_tokens=BLOCK,
        mtp=True,
        share=share,
    )


def placements(ranks: int, layers: Sequence[int] = (1, 2, 3)) -> dict[int, LayerPlacement]:
    """Different in each layer, the one that drafts included."""
    return {layer: random_placement(EXPERTS, ranks, 3, seed=layer) for layer in layers}


def run(model: Deepseek, rank: int) -> list[torch.Tensor]:
    """Two chunks of a prompt with draft passes, a chained draft, and a step in which every second rank has no work."""
    stepper = Stepper(model, BLOCK, blocks=8)
    drafter = Drafter(stepper)
    stream = stepper.stream(tokens(rank, model.vocab_size))
    main, draft = drafter.step([(stream, 7)])
    rest, more = drafter.step([(stream, len(stream.tokens) - 7 - 3)])
    out = [*main, *draft, *rest, *more, *drafter.chain([stream])]
    out += stepper.step([(stream, 2)] if rank % 2 == 0 else [])
    return out


def on_ranks(
    path: Path, ranks: int, combine: Combine, dtype: Any = "float32"
) -> list[list[torch.Tensor]]:
    layers = placements(ranks)

    def work(transport: ThreadTransport) -> list[torch.Tensor]:
        dispatch = partial(AllToAll.of, transport=transport, combine=combine, device=CPU)
        share = Share(rank=transport.rank, layers=layers, dispatch=dispatch)
        return run(loaded(path, share, dtype), transport.rank)

    return Threads(ranks).run(work)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_drafts_are_those_of_one_rank(ranks: int, dtype: str, tmp_path: Path) -> None:
    path = tiny_deepseek(tmp_path, mtp=True)
    for rank, found in enumerate(on_ranks(path, ranks, "exact", dtype)):
        alone = run(loaded(path, dtype=dtype), rank)
        assert len(found) == len(alone) == 5 + (rank % 2 == 0)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_no_rank_takes_experts_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be overwritten, and whoever overwrites what is mapped copies all of a layer first."""
    path, asked = tiny_deepseek(tmp_path, mtp=True), []

    def folder(*_: object, **others: object) -> None:
        asked.append(others)

    monkeypatch.setattr(on_cpu, "packed_folder", folder)
    on_ranks(path, 2, "exact")
    assert not asked
    loaded(path)
    assert asked == [{"drafts": True}]


def test_partial_sums_are_near(tmp_path: Path) -> None:
    path = tiny_deepseek(tmp_path, mtp=True)
    first, again = on_ranks(path, 2, "partial"), on_ranks(path, 2, "partial")
    for rank, found in enumerate(first):
        assert all(torch.equal(a, b) for a, b in zip(found, again[rank], strict=True))
        for got, want in zip(found, run(loaded(path), rank), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_fp8_are_read_by_rank(stacked: bool, tmp_path: Path) -> None:
    raw = tiny_config(mtp=True) | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    }
    write_json_files(tmp_path, raw)
    save_tensors(tmp_path, quantise_fp8(tiny_tensors(raw, fused=stacked))[0])
    for rank, found in enumerate(on_ranks(tmp_path, 2, "exact")):
        alone = run(loaded(tmp_path), rank)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_rank_checks_what_others_read(tmp_path: Path) -> None:
    raw = tiny_config(mtp=True)
    tensors = tiny_tensors(raw)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    write_json_files(tmp_path, raw)
    save_tensors(tmp_path, tensors)
    layers = {layer: LayerPlacement.even(EXPERTS, 2) for layer in (1, 2, 3)}
    share = Share(rank=0, layers=layers, dispatch=lambda placement: placement)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.experts.7.up_proj.weight' is missing"):
        loaded(tmp_path, share)

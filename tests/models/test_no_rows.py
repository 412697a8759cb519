"""Passes without rows, which a rank of a group runs for others: as many exchanges, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.step.rounds import NO_DRAFTS, NO_ROWS
from headrace.models.deepseek import Deepseek, attention_of, load_deepseek
from headrace.models.deepseek_weights import Share, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels.moe.dispatch import Combine, Here, Routed, SingleRank
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.torch_mla import REFERENCE, TRITON, TorchMlaBackend
from helpers.models.drafting import Drafter
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import tiny_deepseek

BLOCK, EXPERTS = 16, 8


class Counting(SingleRank):
    """All experts are here, and exchanges are counted."""

    sent = 0
    combine: Combine = "exact"

    def send(self, routed: Routed) -> Here:
        Counting.sent += 1
        return super().send(routed)


def native(path: Path, dtype: Any) -> Deepseek:
    return load_deepseek(
        SafetensorsCheckpoint(path),
        dtype=dtype,
        device="cpu",
        block_tokens=BLOCK,
        mtp=True,
        share=share(),
    )


def share() -> Share:
    layers = {layer: LayerPlacement.even(EXPERTS, 1) for layer in (1, 2, 3)}
    return Share(rank=0, layers=layers, dispatch=lambda _: Counting())


def on_torch(path: Path, kernels: Any) -> Deepseek:
    pytest.importorskip("triton")
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, BLOCK, mtp=True)
    backend = TorchMlaBackend(attention, dtype="float32", device="cpu", kernels=kernels)
    weights = load_weights(checkpoint, backend, mtp=True, share=share())
    return Deepseek(checkpoint.config, weights, backend, BLOCK)


LOAD: dict[str, Callable[[Path], Deepseek]] = {
    "float32": lambda path: native(path, "float32"),
    "int8": lambda path: native(path, "int8"),
    "reference": lambda path: on_torch(path, REFERENCE),
    "triton": lambda path: on_torch(path, TRITON),
}


@pytest.mark.parametrize("kind", LOAD)
def test_a_pass_without_rows_has_the_exchanges_of_one_with_rows(kind: str, tmp_path: Path) -> None:
    model = LOAD[kind](tiny_deepseek(tmp_path, mtp=True))
    drafter = Drafter(Stepper(model, BLOCK, blocks=8))
    stream = drafter.stepper.stream(list(range(3, 12)))

    def exchanges(run: Callable[[], object]) -> int:
        before = Counting.sent
        run()
        return Counting.sent - before

    with torch.inference_mode():
        both = exchanges(lambda: drafter.step([(stream, 4)]))
        assert both == 3  # layers 1 and 2, and the one that drafts
        assert exchanges(lambda: model.forward(NO_ROWS)) == 2
        assert exchanges(lambda: model.draft(NO_DRAFTS)) == 1
        assert model.forward(NO_ROWS).shape == (0, model.vocab_size)


@pytest.mark.parametrize("kind", ["float32", "reference"])
def test_passes_without_rows_change_nothing(kind: str, tmp_path: Path) -> None:
    """Also drafts that begin from the tails of blocks, which is what follows a pull of KV."""
    path = tiny_deepseek(tmp_path, mtp=True)
    found: list[list[torch.Tensor]] = []
    for empty in (False, True):
        model = LOAD[kind](path)
        drafter = Drafter(Stepper(model, BLOCK, blocks=8))
        stream = drafter.stepper.stream([(7 * i) % 40 + 3 for i in range(BLOCK + 6)])

        def pause(model: Deepseek = model, empty: bool = empty) -> None:
            if empty:
                model.draft(NO_DRAFTS)
                model.forward(NO_ROWS)
                model.draft(NO_DRAFTS)

        pause()
        with torch.inference_mode():
            main, drafts = drafter.step([(stream, BLOCK)])
            pause()
            again = drafter.stepper.stream(stream.tokens, stream, cached=BLOCK)
            pulled = drafter.draft([(again, range(BLOCK, BLOCK + 1), [-(stream.blocks[0] + 1)])])
            pause()
            rest, more = drafter.step([(stream, 3)])
            chained = drafter.chain([stream])
        found.append([*main, *drafts, *pulled, *rest, *more, *chained])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

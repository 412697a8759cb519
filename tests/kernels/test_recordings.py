"""Recorded steps against the same steps launch by launch, to the bit.

Without a GPU a recording is what makes the launches once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.models import Model
from headrace.models.deepseek import Deepseek
from headrace.models.deepseek import attention_of as latent_attention
from headrace.models.deepseek_weights import load_weights as load_deepseek_weights
from headrace.models.llama import Llama, attention_of, load_weights
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace_kernels import recordings, torch_mla, torch_ops
from headrace_kernels.attention import mla_attention, paged_attention, span_plan
from headrace_kernels.recordings import Form, Record, Recordings
from headrace_kernels.torch_mla import TorchMlaBackend
from headrace_kernels.torch_ops import TorchBackend
from helpers.models.stepping import Stepper
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
# A recording that computes nothing while it is made.
AGAIN: Record | None = (
    None if DEVICE.type == "cuda" else (lambda launches: lambda: void(launches()))
)


def void(_: object) -> None:
    """A replay gives nothing."""


def llama(path: Path, record: Record | None = AGAIN, *, recorded: bool) -> Model:
    checkpoint = SafetensorsCheckpoint(path)
    attention = attention_of(checkpoint.config, BLOCK)
    backend = TorchBackend(attention, dtype="float32", device=str(DEVICE), kernels=torch_ops.TRITON)
    backend.recordings = Recordings(DEVICE, record) if recorded else None
    weights = load_weights(checkpoint, backend)
    return Llama(checkpoint.config, weights, backend, BLOCK)


def deepseek(path: Path, *, recorded: bool, mtp: bool = False) -> Model:
    checkpoint = SafetensorsCheckpoint(path)
    attention = latent_attention(checkpoint.config, BLOCK, mtp=mtp)
    backend = TorchMlaBackend(
        attention, dtype="float32", device=str(DEVICE), kernels=torch_mla.TRITON
    )
    backend.recordings = Recordings(DEVICE, AGAIN) if recorded else None
    weights = load_deepseek_weights(checkpoint, backend, mtp=mtp)
    return Deepseek(checkpoint.config, weights, backend, BLOCK)


def recordings_of(model: Any) -> Recordings:
    return model._store.recordings


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of some tokens have several spans, and forms change with few of them."""
    monkeypatch.setattr(mla_attention, "SPAN", 32)
    monkeypatch.setattr(paged_attention, "SPAN", 64)
    monkeypatch.setattr(span_plan, "WORKS", 4)
    monkeypatch.setattr(torch_ops, "TABLE_BLOCKS", 2)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, count).tolist()


def decoded(
    model: Model, steps: int, *, longest: int = 62, join_at: int = 1 << 30
) -> list[list[torch.Tensor]]:
    """Two sequences, and from `join_at` on three, which are fed what stands in them already."""
    stepper = Stepper(model, BLOCK, blocks=64)
    streams = [stepper.stream(tokens(200, seed)) for seed in range(3)]
    for stream, prompt in zip(streams, (longest, 3, 9), strict=True):
        stepper.step([(stream, prompt)])
    return [
        stepper.step([(stream, 1) for stream in streams[: 3 if at >= join_at else 2]])
        for at in range(steps)
    ]


def same(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(found, wanted, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.usefixtures("small")
def test_a_llama_recorded(tmp_path: Path) -> None:
    """Contexts grow from one span to two, and from one block of a table to the next; a sequence joins."""
    path = tiny_llama(tmp_path / "tiny", num_hidden_layers=1)
    model = llama(path, recorded=True)
    assert same(decoded(model, 10, join_at=7), decoded(llama(path, recorded=False), 10, join_at=7))
    assert recordings_of(model).replayed >= 6


@pytest.mark.usefixtures("small")
def test_a_deepseek_recorded(tmp_path: Path) -> None:
    path = tiny_deepseek(tmp_path / "tiny", num_hidden_layers=2)
    model = deepseek(path, recorded=True)
    found, wanted = (decoded(m, 5, longest=30) for m in (model, deepseek(path, recorded=False)))
    assert same(found, wanted)
    assert recordings_of(model).replayed >= 2


def test_what_a_recording_cannot_give_is_not_recorded(tmp_path: Path) -> None:
    model = llama(tiny_llama(tmp_path / "tiny"), recorded=True)
    stepper = Stepper(model, BLOCK)
    for _ in range(3):
        stepper.step([(stepper.stream(tokens(20, 1)), 3)])  # prompts
    stream = stepper.stream(tokens(20, 1))
    stepper.pools = True
    for _ in range(3):
        stepper.step([(stream, 1)])
    assert recordings_of(model).replayed == 0
    drafts = deepseek(tiny_deepseek(tmp_path / "drafts", mtp=True), recorded=True, mtp=True)
    stepper = Stepper(drafts, BLOCK)
    stream = stepper.stream(tokens(20, 1))
    for _ in range(3):
        stepper.step([(stream, 1)])
    assert recordings_of(drafts).replayed == 0


def test_a_device_that_cannot_record_is_said_once_and_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(_: Callable[[], object]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    path = tiny_llama(tmp_path / "tiny", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        found = decoded(llama(path, cannot, recorded=True), 3, longest=5)
    assert same(found, decoded(llama(path, recorded=False), 3, longest=5))
    assert caplog.text.count("launch by launch: operation not permitted") == 1


def test_a_new_cache_is_not_read_through_old_recordings(tmp_path: Path) -> None:
    model = llama(tiny_llama(tmp_path / "tiny", num_hidden_layers=1), recorded=True)
    first = decoded(model, 3, longest=5)
    assert same(decoded(model, 3, longest=5), first)  # a stepper makes a cache of its own
    assert recordings_of(model).replayed == 4


@dataclass
class Fake:
    """A step that multiplies a number of its form with its input."""

    number: int
    x: torch.Tensor
    calls: list[str] = field(default_factory=list)

    def form(self) -> Form | None:
        return (self.number,) if self.number else None

    def inputs(self) -> list[torch.Tensor]:
        return [self.x]

    def compute(self) -> torch.Tensor:
        self.calls.append("compute")
        return self.number * self.x[:, None].float()


def run(known: Recordings, number: int, *values: int, dtype: torch.dtype = torch.int32) -> Fake:
    step = Fake(number, torch.tensor(values, dtype=dtype))
    found = known.run(step, step.compute)
    assert found.tolist() == [[number * value] for value in values] and found.dtype == torch.float32
    return step


def test_the_second_step_of_a_form_is_recorded_and_later_ones_bring_their_inputs() -> None:
    known = Recordings(torch.device("cpu"), lambda launches: lambda: void(launches()))
    first, second, third, fourth = (run(known, 3, i, i + 1) for i in range(4))
    assert [len(step.calls) for step in (first, second, third, fourth)] == [1, 3, 0, 0]
    assert known.replayed == 3
    for other in (run(known, 4, 1, 2), run(known, 3, 1), run(known, 3, 1, 2, dtype=torch.int64)):
        assert other.calls == ["compute"], "other numbers, rows or types are other forms"
    assert run(known, 3, 7, 8).calls == []


def test_more_rows_than_before_have_room_and_old_recordings_do_not_write_past_it() -> None:
    known = Recordings(torch.device("cpu"), lambda launches: lambda: void(launches()))
    for _ in range(3):
        run(known, 2, 5, 6)
    for _ in range(3):
        run(known, 2, *range(9))
    for _ in range(3):
        run(known, 2, 5, 6)
    assert known.replayed == 6


def test_few_recordings_are_kept_and_those_used_last_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recordings, "MOST", 2)
    monkeypatch.setattr(recordings, "FORMS", 2)
    known = Recordings(torch.device("cpu"), lambda launches: lambda: void(launches()))
    for number in (1, 2):
        for _ in range(2):
            run(known, number, 1)
    run(known, 1, 1)
    for _ in range(2):
        run(known, 3, 1)
    assert run(known, 1, 4).calls == []
    assert run(known, 2, 4).calls == ["compute"], "it was forgotten"
    for number in (5, 6, 7):
        run(known, number, 1)
    assert run(known, 2, 4).calls == ["compute"], "forms that were seen are bounded too"

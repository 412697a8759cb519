"""The R1-shaped runs of `make gpu`: how large they are, what they do with too little memory, what is modelled."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import communication, slices
from bench.gpu.random_checkpoint import R1_CONFIG, layer_bytes
from bench.gpu.steps import decode, prefill
from bench.kernels.one_rank import OneRankOf
from bench.kernels.timing import HostClock
from headrace.models.config import parse_config
from headrace_kernels.moe.dispatch import Combine, Routed
from headrace_kernels.ops import Routing

CPU = torch.device("cpu")


def test_a_layer_has_the_bytes_of_r1s() -> None:
    config = parse_config(R1_CONFIG)
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 128 * 128 * 7168 + 2 * 128 * 256 * 512
    expert = 3 * 7168 * 2048
    # scales add 1 in 4,096; norms and the router's bias are less
    assert layer_bytes(config, 0) == pytest.approx(attention + 3 * 7168 * 18_432, rel=1e-3)
    assert layer_bytes(config, 60) == pytest.approx(
        attention + 257 * expert + 2 * 256 * 7168, rel=1e-3
    )


def full(monkeypatch: pytest.MonkeyPatch, fitting: int, room: int) -> list[int]:
    """A device that has `room` layers' memory, though there seemed to be some for `fitting`; what was tried."""
    tried: list[int] = []

    def build(raw: dict[str, Any], *_: object) -> object:
        tried.append(raw["num_hidden_layers"])
        if tried[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace()

    monkeypatch.setattr(slices, "_fitting", lambda *_: fitting)
    monkeypatch.setattr(slices, "build", build)
    monkeypatch.setattr(slices, "steps_of", lambda *_: [])
    return tried


def test_with_too_little_memory_there_are_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full(monkeypatch, fitting=9, room=5)
    row = slices.whole_layers(slices.FULL, HostClock(), CPU, time.monotonic())
    assert tried == [9, 7, 5]
    assert (row["layers"], row["dense_layers"]) == (5, 1)


def test_with_no_memory_at_all_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full(monkeypatch, fitting=4, room=1)
    row = slices.whole_layers(slices.FULL, HostClock(), CPU, time.monotonic())
    assert tried == [4, 2]
    assert row["failed"] == "OutOfMemoryError: CUDA out of memory"


def test_steps_without_any_time_left_are_named() -> None:
    model: Any = SimpleNamespace()
    rows = slices.steps_of(model, slices.DRY, HostClock(), time.monotonic() - 1)
    assert [row["step"] for row in rows] == slices.step_names(slices.DRY)
    assert all(row["left_out"] for row in rows)


def test_a_step_that_runs_out_of_memory_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, *_: object) -> dict[str, Any]:
        if name.startswith("decode"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"step": name, "dry": True}

    monkeypatch.setattr(slices, "run", run)
    model: Any = SimpleNamespace()
    first, *_, last = slices.steps_of(model, slices.FULL, HostClock(), time.monotonic() + 1e9)
    assert first["failed"] == "OutOfMemoryError: CUDA out of memory"
    assert last == {"step": "prefill, 4096 tokens", "dry": True}


def test_logits_that_are_not_finite_are_no_measurement() -> None:
    model: Any = SimpleNamespace(forward=lambda _: torch.full((1, 3), torch.nan))
    # The others may be of a broken device.
    (row,) = slices.steps_of(model, slices.DRY, HostClock(), time.monotonic() + 1e9)
    assert row["failed"].endswith("logits are not finite")


def test_rows_are_the_last_of_their_contexts_each_in_a_slot_of_its_own() -> None:
    batch = decode(3, 10, 4)
    assert batch.positions.tolist() == [9, 9, 9]
    assert batch.prompt_lens is not None
    assert (batch.positions >= batch.prompt_lens).all()  # all are answers
    blocks = batch.block_tables[:, 2]
    assert batch.slots.tolist() == (blocks * 4 + 1).tolist()
    prompt = prefill(10, 4)
    assert prompt.prompt_lens is not None
    assert prompt.rows == 10
    assert (prompt.positions < prompt.prompt_lens[0]).all()
    assert len(set(prompt.slots.tolist())) == 10


def test_a_rank_gets_as_many_pairs_as_it_sends() -> None:
    ids = torch.tensor([[0, 9], [5, 30]], dtype=torch.int32)
    x = torch.arange(4.0).view(2, 2)
    rank = OneRankOf(local_experts=4, top_k=2)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    sent = rank.send(Routed(x, ids, weights))
    received = sent.receive()
    assert received.slots.tolist() == [[0], [1], [1], [2]]
    assert torch.equal(received.weights.flatten(), weights.flatten())
    assert received.x.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    returned = sent.collect(received.x, torch.arange(4).view(4, 1))
    assert returned.places.tolist() == [[0, 1], [2, 3]]


R1_ROUTING = Routing(experts=256, top_k=8, groups=8, top_groups=4, normalise=True, scale=2.5)


@pytest.mark.parametrize(
    ("ranks", "combine", "kilobytes"),  # of a row, as docs/design/expert_parallelism.md works them out
    [(1, "exact", 0.0), (2, "exact", 64.5), (8, "partial", 69.2), (32, "exact", 158.8), (32, "partial", 139.3)],
)  # fmt: skip
def test_the_exchange_has_the_bytes_of_the_seam(
    ranks: int, combine: Combine, kilobytes: float
) -> None:
    network = communication.Network(name="n", bytes_per_s=1e9, latency_us=5.0, source="s")
    us = communication.exchange_us(
        network, R1_ROUTING, rows=128, hidden=7168, ranks=ranks, combine=combine
    )
    # A group is taken for its two best experts, so a row goes to more ranks than by even choices: nearly 4 of 8.
    assert us == pytest.approx(10 + 128 * kilobytes, rel=0.1)


def test_the_exchange_is_a_model_and_says_so() -> None:
    rows = communication.modelled(R1_ROUTING, rows=128, hidden=7168, ranks=32, layers=58)
    assert all(row["is"] == "modelled, not measured" for row in rows)
    assert {row["combine"] for row in rows} == {"exact", "partial"}

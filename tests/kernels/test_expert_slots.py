"""Slots: how often experts are chosen, and other experts in the same place in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace_kernels.native import NativeBackend
from headrace_kernels.ops import MlaAttention, MlaStep, Routing, Value
from helpers.e4m3 import NEEDS_E4M3
from helpers.paged_rows import PagedRows

HIDDEN, WIDTH = 40, 24
ROUTING = Routing(experts=6, top_k=2, groups=1, top_groups=1, normalise=True, scale=1.0)
ATTENTION = MlaAttention(
    layers=1, heads=1, kv_lora_rank=1, nope_dim=0, rope_dim=2, v_dim=1, block_tokens=16, context_tokens=64,
    scale=1.0, inv_freq=[1.0], rope_scale=1.0, rope_interleave=True, hidden_size=0, mtp=False,
)  # fmt: skip


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GATE, BIAS = noise(6, HIDDEN, seed=1), torch.zeros(6)
GATE_UP, DOWN = noise(6, 2 * WIDTH, HIDDEN, seed=2), noise(6, HIDDEN, WIDTH, seed=3)
OTHER = noise(2 * WIDTH, HIDDEN, seed=4), noise(HIDDEN, WIDTH, seed=5)
ROWS = noise(20, HIDDEN, seed=6)


class Layer:
    """Experts on the native backend, over some rows."""

    def __init__(self, dtype: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.backend = NativeBackend(ATTENTION, dtype=dtype)
        self.backend.allocate_kv(2)
        self.experts = self.backend.experts(GATE, BIAS, list(gate_up), list(down), ROUTING)
        table = self.backend.table(ROWS)

        def describe(step: MlaStep) -> Value:
            x = step.embed(table)
            return step.wanted_rows(step.moe(x, self.experts, x))

        self._run = self.backend.compile(describe)

    def __call__(self) -> torch.Tensor:
        rows = PagedRows([len(ROWS)])
        return self._run(rows.batch(rows.whole())).clone()


def array(x: torch.Tensor) -> tuple[np.ndarray, str]:
    return x.numpy(), "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_an_overwritten_slot_computes_the_other_expert(dtype: str) -> None:
    layer = Layer(dtype, GATE_UP, DOWN)
    before = layer()
    for slot in (0, 3, 5):
        layer.experts.overwrite(slot, *map(array, OTHER))
        gate_up, down = GATE_UP.clone(), DOWN.clone()
        gate_up[slot], down[slot] = OTHER
        found = layer()
        assert torch.equal(found, Layer(dtype, gate_up, down)())
        assert not torch.equal(found, before)
        layer.experts.overwrite(slot, array(GATE_UP[slot]), array(DOWN[slot]))
        assert torch.equal(layer(), before)


def test_an_expert_that_does_not_fit_changes_nothing() -> None:
    layer = Layer("float32", GATE_UP, DOWN)
    before = layer()
    for slot, gate_up, down, text in (
        (6, *OTHER, "slot 6 of a rank that has 6"),
        (1, OTHER[0][:-1], OTHER[1], "gate_up has 1880 elements, expected 1920"),
        (1, OTHER[0], OTHER[1][:-1], "down has 936 elements, expected 960"),
        (1, OTHER[1], OTHER[1], "a tensor is not 40 wide"),
        (1, OTHER[0], OTHER[0], "a tensor is not 24 wide"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.experts.overwrite(slot, array(gate_up), array(down))
    with pytest.raises(OverflowError):
        layer.experts.overwrite(-1, *map(array, OTHER))
    assert torch.equal(layer(), before)


def test_choices_are_counted_by_expert_and_add_up() -> None:
    layer = Layer("float32", GATE_UP, DOWN)
    assert layer.experts.counts.tolist() == [0] * 6
    layer()
    want = (ROWS @ GATE.T).topk(2).indices.flatten().bincount(minlength=6)
    assert layer.experts.counts.tolist() == want.tolist()
    layer()
    assert layer.experts.counts.tolist() == (2 * want).tolist()


def test_kernels_on_torch_count_alike() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.moe.route import route, route_ref

    routing = replace(ROUTING, top_k=3, groups=3, top_groups=2)
    logits = noise(33, 6, seed=8)
    logits[4] = torch.nan
    counts = [torch.full((6,), 7), torch.full((6,), 7)]
    ids = [f(logits, BIAS, routing, c)[0] for f, c in zip((route, route_ref), counts, strict=True)]
    want = 7 + ids[1].flatten().bincount(minlength=6)
    assert torch.equal(counts[0], want) and torch.equal(counts[1], want)
    assert torch.equal(ids[0], route(logits, BIAS, routing)[0])


def test_slots_of_torch_keep_their_place() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.moe.dispatch import SingleRank
    from headrace_kernels.moe.experts import Experts, moe_ref

    def made(gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        return Experts(
            gate=GATE, bias=BIAS, counts=torch.zeros(6, dtype=torch.int64), gate_up=gate_up, down=down,
            routing=ROUTING, dispatch=SingleRank(),
        )  # fmt: skip

    experts = made(GATE_UP.clone(), DOWN.clone())
    assert isinstance(experts.gate_up, torch.Tensor)
    address = experts.gate_up.data_ptr()
    experts.overwrite(2, *OTHER)
    gate_up, down = GATE_UP.clone(), DOWN.clone()
    gate_up[2], down[2] = OTHER
    assert torch.equal(moe_ref(ROWS, experts, ROWS), moe_ref(ROWS, made(gate_up, down), ROWS))
    assert experts.gate_up.data_ptr() == address


@NEEDS_E4M3
def test_slots_in_fp8_take_values_and_scales() -> None:
    from headrace_kernels.dense.fp8_linear import fp8_matrix
    from headrace_kernels.moe.fp8_grouped_linear import fp8_experts

    def one(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = noise(130, 140, seed=seed).to(torch.float8_e4m3fn)
        return values, noise(2, 2, seed=seed + 1).abs()

    held = fp8_experts([fp8_matrix([one(seed)]) for seed in (1, 3, 5)])
    addresses = held.weight.data_ptr(), held.scale.data_ptr()
    other = fp8_matrix([one(7)])
    kept = [held[slot].dequantised() for slot in (0, 2)]
    held.overwrite(1, other)
    assert torch.equal(held[1].dequantised(), other.dequantised())
    assert all(torch.equal(held[s].dequantised(), k) for s, k in zip((0, 2), kept, strict=True))
    assert (held.weight.data_ptr(), held.scale.data_ptr()) == addresses

"""Slots: how often experts are chosen, and other experts in the same place in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace_kernels.moe.dispatch import SingleRank
from headrace_kernels.ops import GatedMlp, MlaAttention, MlaStep, Routing, Value
from helpers.kernels.e4m3 import NEEDS_E4M3
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend

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
    """Experts on the native backend, over some rows. Fewer than all cannot be run."""

    def __init__(self, dtype: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.backend = TensorBackend(ATTENTION, dtype=dtype)
        self.backend.allocate_kv(2)
        dispatch = None if len(gate_up) == len(GATE) else SingleRank()
        self.experts = self.backend.experts(
            GATE, BIAS, list(gate_up), list(down), ROUTING, dispatch=dispatch
        )
        table = self.backend.table(ROWS)

        def describe(step: MlaStep) -> Value:
            x = step.embed(table)
            return step.wanted_rows(step.moe(x, self.experts, x))

        self._run = self.backend.compile(describe)

    def __call__(self) -> torch.Tensor:
        rows = PagedRows([len(ROWS)])
        return self._run(rows.batch(rows.whole())).clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_an_overwritten_slot_computes_the_other_expert(dtype: str) -> None:
    layer = Layer(dtype, GATE_UP, DOWN)
    before = layer()
    for slot in (0, 3, 5):
        layer.backend.overwrite_expert(layer.experts, slot, *OTHER)
        gate_up, down = GATE_UP.clone(), DOWN.clone()
        gate_up[slot], down[slot] = OTHER
        found = layer()
        assert torch.equal(found, Layer(dtype, gate_up, down)())
        assert not torch.equal(found, before)
        layer.backend.overwrite_expert(layer.experts, slot, GATE_UP[slot], DOWN[slot])
        assert torch.equal(layer(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_an_image_has_the_bits_of_a_load(dtype: str) -> None:
    layer, other = Layer(dtype, GATE_UP, DOWN), Layer(dtype, OTHER[0][None], OTHER[1][None])
    gate_up, down = GATE_UP.clone(), DOWN.clone()
    gate_up[2], down[2] = OTHER
    want = Layer(dtype, gate_up, down)
    image = other.backend.read_slot(other.experts, 0)
    assert len(image) == layer.backend.slot_bytes(layer.experts)
    layer.backend.write_slot(layer.experts, 2, image)
    for slot in range(6):
        found, wanted = (x.backend.read_slot(x.experts, slot) for x in (layer, want))
        assert torch.equal(found, wanted)
    assert torch.equal(layer(), want())


def test_an_image_that_does_not_fit_changes_nothing() -> None:
    layer = Layer("int8", GATE_UP, DOWN)
    before, image = layer(), layer.backend.read_slot(layer.experts, 3)
    for slot, bad, text in (
        (6, image, "slot 6 of a rank that has 6"),
        (1, image[1:], f"image of an expert has {len(image) - 1} elements, expected {len(image)}"),
        (1, torch.cat((image, image)), "image of an expert has"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.backend.write_slot(layer.experts, slot, bad)
    with pytest.raises(TypeError):
        layer.backend.write_slot(layer.experts, 1, image.float())
    with pytest.raises(ValueError, match="slot 6 of a rank that has 6"):
        layer.backend.read_slot(layer.experts, 6)
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
            layer.backend.overwrite_expert(layer.experts, slot, gate_up, down)
    with pytest.raises(OverflowError):
        layer.backend.overwrite_expert(layer.experts, -1, *OTHER)
    assert torch.equal(layer(), before)


def test_a_shared_expert_that_does_not_fit_is_named() -> None:
    backend = TensorBackend(ATTENTION, dtype="float32")
    for gate_up, down, text in (
        ((48, 39), (40, 24), "row of the shared gate_up has 39 elements, expected 40"),
        ((48, 40), (39, 24), "row of the shared expert has 39 elements, expected 40"),
        ((47, 40), (40, 24), "shared gate_up has 47 elements, expected 48"),
    ):
        shared = GatedMlp(
            gate_up=backend.matrix([torch.ones(gate_up)]), down=backend.matrix([torch.ones(down)])
        )
        with pytest.raises(ValueError, match=text):
            backend.experts(GATE, BIAS, list(GATE_UP), list(DOWN), ROUTING, shared=shared)


def test_choices_are_counted_by_expert_and_add_up() -> None:
    layer = Layer("float32", GATE_UP, DOWN)
    assert layer.backend.expert_counts(layer.experts).tolist() == [0] * 6
    layer()
    want = (ROWS @ GATE.T).topk(2).indices.flatten().bincount(minlength=6)
    assert layer.backend.expert_counts(layer.experts).tolist() == want.tolist()
    layer()
    assert layer.backend.expert_counts(layer.experts).tolist() == (2 * want).tolist()


def test_kernels_on_torch_count_alike() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.moe.route import route, route_ref

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    routing = replace(ROUTING, top_k=3, groups=3, top_groups=2)
    logits, bias = noise(33, 6, seed=8).to(device), BIAS.to(device)
    logits[4] = torch.nan
    counts = [torch.full((6,), 7, device=device), torch.full((6,), 7, device=device)]
    ids = [f(logits, bias, routing, c)[0] for f, c in zip((route, route_ref), counts, strict=True)]
    want = 7 + ids[1].flatten().bincount(minlength=6)
    assert torch.equal(counts[0], want) and torch.equal(counts[1], want)
    assert torch.equal(ids[0], route(logits, bias, routing)[0])


def test_slots_of_torch_keep_their_place() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.moe.experts import moe_ref
    from headrace_kernels.torch_mla import REFERENCE, TorchMlaBackend

    backend = TorchMlaBackend(ATTENTION, dtype="float32", device="cpu", kernels=REFERENCE)
    experts = backend.experts(GATE, BIAS, list(GATE_UP), list(DOWN), ROUTING)
    assert isinstance(experts.gate_up, torch.Tensor)
    address = experts.gate_up.data_ptr()
    backend.overwrite_expert(experts, 2, *OTHER)
    gate_up, down = list(GATE_UP), list(DOWN)
    gate_up[2], down[2] = OTHER
    anew = backend.experts(GATE, BIAS, gate_up, down, ROUTING)
    assert torch.equal(moe_ref(ROWS, experts, ROWS), moe_ref(ROWS, anew, ROWS))
    assert torch.equal(backend.read_slot(experts, 2), backend.read_slot(anew, 2))
    backend.write_slot(experts, 2, backend.read_slot(anew, 1))
    assert torch.equal(backend.read_slot(experts, 2), backend.read_slot(anew, 1))
    assert experts.gate_up.data_ptr() == address
    image = backend.read_slot(anew, 0)
    for slot, bad, text in (
        (6, image, "slot 6 of"),
        (-1, image, "slot -1"),
        (0, image[1:], "an image of"),
    ):
        with pytest.raises(ValueError, match=text):
            backend.write_slot(experts, slot, bad)
    backend.write_slot(experts, 2, backend.read_slot(anew, 2))
    want = (ROWS @ GATE.T).topk(2).indices.flatten().bincount(minlength=6)
    assert backend.expert_counts(experts).tolist() == want.tolist()


@NEEDS_E4M3
def test_slots_in_fp8_take_values_and_scales() -> None:
    pytest.importorskip("triton")
    from headrace_kernels.moe.fp8_grouped_linear import Fp8Experts
    from headrace_kernels.torch_mla import REFERENCE, TorchMlaBackend

    def matrix(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = -(-rows // 128), -(-columns // 128)
        values = noise(rows, columns, seed=seed).to(torch.float8_e4m3fn)
        return values, noise(*blocks, seed=seed + 1).abs()

    def expert(seed: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], ...]:
        """Gate and up apart, as a checkpoint has them: a seam in the middle of a block."""
        halves = [matrix(130, 140, seed), matrix(130, 140, seed + 2)]
        return halves, [matrix(140, 130, seed + 4)]

    backend = TorchMlaBackend(ATTENTION, dtype="float32", device="cpu", kernels=REFERENCE)
    gate_up, down = zip(*[expert(seed) for seed in (10, 20, 30)], strict=True)
    routing = replace(ROUTING, experts=3)
    held = backend.fp8_experts(noise(3, 140, seed=1), torch.zeros(3), gate_up, down, routing)
    other = expert(40)
    anew = backend.fp8_experts(
        noise(3, 140, seed=1),
        torch.zeros(3),
        [gate_up[0], other[0], gate_up[2]],
        [down[0], other[1], down[2]],
        routing,
    )
    assert isinstance(held.gate_up, Fp8Experts) and isinstance(held.down, Fp8Experts)
    addresses = held.gate_up.weight.data_ptr(), held.down.scale.data_ptr()
    image = backend.read_slot(anew, 1)
    assert len(image) == backend.slot_bytes(held)
    backend.overwrite_fp8_expert(held, 1, *other)
    assert torch.equal(backend.read_slot(held, 1), image)
    backend.write_slot(held, 1, backend.read_slot(held, 0))
    assert torch.equal(backend.read_slot(held, 1), backend.read_slot(anew, 0))
    backend.write_slot(held, 1, image)
    for half in ("gate_up", "down"):
        for slot in range(3):
            found, want = getattr(held, half)[slot], getattr(anew, half)[slot]
            assert torch.equal(found.dequantised(), want.dequantised())
    assert (held.gate_up.weight.data_ptr(), held.down.scale.data_ptr()) == addresses

"""The experts of the native backend: against their formula in float64, and bit by bit against themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from headrace_kernels.ops import Compiled, MlaAttention, MlaStep, Routing, Value
from helpers.kernels.paged_rows import PagedRows
from helpers.kernels.tensor_backend import TensorBackend, floats_of

ATTENTION = MlaAttention(
    layers=1,
    heads=1,
    kv_lora_rank=1,
    nope_dim=0,
    rope_dim=2,
    v_dim=1,
    block_tokens=16,
    context_tokens=4096,
    scale=1.0,
    inv_freq=[1.0],
    rope_scale=1.0,
    rope_interleave=True,
    hidden_size=0,
    mtp=False,
)
DEEPSEEK = Routing(experts=16, top_k=4, groups=4, top_groups=2, normalise=True, scale=2.5)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Layer:
    gate: torch.Tensor
    bias: torch.Tensor
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]
    routing: Routing

    @classmethod
    def random(cls, routing: Routing, hidden: int, width: int) -> Layer:
        n = routing.experts
        return cls(
            gate=noise(n, hidden, seed=1) / hidden**0.5,
            bias=noise(n, seed=2) / 4,
            gate_up=[noise(2 * width, hidden, seed=3 + 2 * e) / hidden**0.5 for e in range(n)],
            down=[noise(hidden, width, seed=4 + 2 * e) / width**0.5 for e in range(n)],
            routing=routing,
        )

    def compiled(
        self, x: torch.Tensor, dtype: str = "float32", simd: str | None = None
    ) -> Compiled:
        """Of embeddings [x | residual]."""
        backend = TensorBackend(ATTENTION, dtype=dtype, simd=simd)
        backend.allocate_kv(len(x) // 16 + 1)
        experts = backend.experts(self.gate, self.bias, self.gate_up, self.down, self.routing)
        table, hidden = backend.table(x), self.gate.shape[1]

        def describe(step: MlaStep) -> Value:
            e = step.embed(table)
            x, residual = step.columns(e, 0, hidden), step.columns(e, hidden, 2 * hidden)
            return step.wanted_rows(step.moe(x, experts, residual))

        return backend.compile(describe)

    def __call__(
        self, x: torch.Tensor, dtype: str = "float32", simd: str | None = None
    ) -> torch.Tensor:
        rows = PagedRows([len(x)])
        return floats_of(self.compiled(x, dtype, simd)(rows.batch(rows.whole())))

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = x.double().chunk(2, dim=1)
        r = self.routing
        scores = (x @ self.gate.double().T).sigmoid()
        biased = (scores + self.bias.double()).view(len(x), r.groups, -1)
        best = biased.topk(min(2, biased.shape[-1]), dim=-1).values.sum(-1)
        kept = best >= best.topk(r.top_groups, dim=-1).values[:, -1:]
        biased = biased.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = biased.topk(r.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if r.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = residual.clone()
        for row, (experts, ws) in enumerate(zip(chosen, weights * r.scale, strict=True)):
            for e, w in zip(experts.tolist(), ws, strict=True):
                gate, up = (self.gate_up[e].double() @ x[row]).chunk(2)
                middle = torch.nn.functional.silu(gate) * up
                out[row] += w * (self.down[e].double() @ middle)
        return out


CASES = {
    "deepseek": (DEEPSEEK, 64, 32),
    "odd": (replace(DEEPSEEK, experts=9, top_k=3, groups=3), 37, 5),
    "plain": (replace(DEEPSEEK, top_k=1, groups=1, top_groups=1, normalise=False), 33, 17),
    "all": (
        Routing(experts=16, top_k=16, groups=1, top_groups=1, normalise=True, scale=16.0),
        70,
        64,
    ),
    "paired": (replace(DEEPSEEK, experts=32, top_k=16, groups=1, top_groups=1), 48, 16),
    "lone groups": (replace(DEEPSEEK, experts=4, top_k=2, groups=4), 20, 8),
    "one": (Routing(experts=1, top_k=1, groups=1, top_groups=1, normalise=False, scale=1.0), 5, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_the_formula(case: str, rows: int) -> None:
    routing, hidden, width = CASES[case]
    layer = Layer.random(routing, hidden, width)
    x = noise(rows, 2 * hidden)
    torch.testing.assert_close(layer(x).double(), layer.expected(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_rows_have_the_same_bits_alone_and_in_any_company(case: str, dtype: str) -> None:
    routing, hidden, width = CASES[case]
    layer = Layer.random(routing, hidden, width)
    x = noise(130, 2 * hidden)
    many = layer(x, dtype)
    for start, stop in ((0, 1), (5, 6), (7, 13), (100, 117), (30, 130)):
        assert torch.equal(layer(x[start:stop], dtype), many[start:stop])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_instruction_sets_have_the_same_bits(dtype: str) -> None:
    layer = Layer.random(DEEPSEEK, 70, 33)
    x = noise(40, 140)
    want = layer(x, dtype)
    for simd in ("avx2", "portable"):
        try:
            got = layer(x, dtype, simd)
        except ValueError:
            continue  # not on this machine
        assert torch.equal(got, want), simd


def test_the_bias_chooses_and_does_not_weigh() -> None:
    layer = Layer.random(replace(DEEPSEEK, groups=1, top_groups=1, normalise=False), 24, 8)
    layer.bias = torch.zeros(16)
    layer.bias[[2, 3, 5, 7]] = 100.0
    x = noise(6, 48)
    torch.testing.assert_close(layer(x).double(), layer.expected(x), rtol=0, atol=1e-5)
    twice = layer(x)
    layer.bias *= 2
    assert torch.equal(layer(x), twice)


def test_ties_go_to_the_lowest_experts_and_others_are_not_read() -> None:
    layer = Layer.random(replace(DEEPSEEK, groups=1, top_groups=1), 24, 8)
    layer.gate.zero_()
    layer.bias.zero_()
    for e in range(4, 16):  # nobody chooses them
        layer.gate_up[e].fill_(torch.nan)
    got = layer(noise(6, 48))
    assert torch.isfinite(got).all()
    first = Layer.random(replace(DEEPSEEK, groups=1, top_groups=1), 24, 8)
    first.gate.zero_()
    first.bias = torch.tensor([1.0] * 4 + [0.0] * 12)
    assert torch.equal(first(noise(6, 48)), got)


def test_a_router_in_16_bits_computes_in_32() -> None:
    layer = Layer.random(DEEPSEEK, 64, 16)
    layer.gate = layer.gate.to(torch.bfloat16).float()
    x = noise(9, 128)
    want = layer(x, "bfloat16")
    layer.gate = layer.gate.to(torch.bfloat16)
    assert torch.equal(layer(x, "bfloat16"), want)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": 0}, "top_k is 0, must be in 1..=8"),
        ({"top_k": 9}, "top_k is 9, must be in 1..=8"),
        ({"groups": 3}, "16 experts in 3 groups"),
        ({"groups": 0}, "16 experts in 0 groups"),
        ({"top_groups": 5}, "top_groups is 5, must be in 1..=4"),
        ({"experts": 17}, "gate has 16 rows, expected 17"),
    ],
)
def test_a_routing_that_is_none_is_named(change: dict[str, int], text: str) -> None:
    layer = Layer.random(DEEPSEEK, 8, 4)
    layer.routing = replace(DEEPSEEK, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        layer(noise(1, 16))


def test_tensors_that_do_not_fit_are_named() -> None:
    def broken(text: str, **change: object) -> None:
        layer = replace(Layer.random(DEEPSEEK, 8, 4), **change)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=text):
            layer(noise(1, 16))

    good = Layer.random(DEEPSEEK, 8, 4)
    broken("bias has 15 elements, expected 16", bias=torch.zeros(15))
    broken("list of gate_up has 15 elements, expected 16", gate_up=good.gate_up[1:])
    broken("list of down has 15 elements, expected 16", down=good.down[1:])
    broken("list of down has 0 elements, expected 16", down=[])
    broken("a tensor is not 8 wide", gate_up=[*good.gate_up[1:], torch.zeros(8, 7)])
    broken("gate_up has 48 elements, expected 64", gate_up=[*good.gate_up[1:], torch.zeros(6, 8)])
    broken("a tensor is not 4 wide", down=[*good.down[1:], torch.zeros(8, 3)])
    broken("down has 28 elements, expected 32", down=[*good.down[1:], torch.zeros(7, 4)])

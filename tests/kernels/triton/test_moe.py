"""The Triton kernels of a mixture of experts against their torch references, and to the bit against themselves.

Tolerances: float32 sums of a few hundred terms in another order differ by some 1e-6 relative; float16 and bfloat16
results by one or two roundings.
"""

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.dense.fp8_linear import fp8_matrix
from headrace_kernels.moe import combine as moe_combine
from headrace_kernels.moe import fp8_grouped_linear
from headrace_kernels.moe import grouped_linear as moe_grouped_linear
from headrace_kernels.moe import permute as moe_permute
from headrace_kernels.moe.combine import combine, combine_ref
from headrace_kernels.moe.dispatch import SingleRank
from headrace_kernels.moe.experts import Experts, moe, moe_ref
from headrace_kernels.moe.fp8_grouped_linear import Fp8Experts, fp8_experts
from headrace_kernels.moe.grouped_linear import (
    FEW,
    MANY,
    grouped_linear,
    grouped_linear_ref,
    most_tiles,
)
from headrace_kernels.moe.permute import Permutation, permute, permute_ref
from headrace_kernels.moe.route import route, route_ref
from headrace_kernels.ops import Routing
from helpers.kernels.e4m3 import NEEDS_E4M3

pytestmark = pytest.mark.matrix
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def routing_of(
    experts: int, top_k: int, groups: int = 1, top_groups: int = 1, *, normalise: bool = True
) -> Routing:
    return Routing(
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        normalise=normalise,
        scale=2.5,
    )


@pytest.mark.parametrize(
    "routing",
    [
        routing_of(16, 4, 4, 2),
        routing_of(12, 3, 3, 2, normalise=False),  # padded in both directions
        routing_of(8, 8),  # all of them
        routing_of(5, 2, 5, 3),  # groups of one
        routing_of(1, 1),
    ],
    ids=lambda r: f"{r.experts}-{r.top_k}-{r.groups}-{r.top_groups}",
)
def test_route(routing: Routing) -> None:
    logits, bias = draw(9, routing.experts), draw(routing.experts, seed=1) * 0.1 - 0.7
    logits[3] = 0.0
    bias[: routing.experts // 2] = bias[-1]  # so that many are equal
    ids, weights = route(logits, bias, routing)
    want_ids, want_weights = route_ref(logits, bias, routing)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    alone, weights_alone = route(logits[4:5].contiguous(), bias, routing)
    assert torch.equal(alone, ids[4:5]) and torch.equal(weights_alone, weights[4:5])


def test_a_row_that_is_no_number_still_gets_experts() -> None:
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    logits[1, :4] = 0.0
    ids, _ = route(logits, torch.zeros(6, device=DEVICE), routing_of(6, 3))
    assert ids.tolist() == [[0, 1, 2]] * 2


def rows_of(permutation: Permutation) -> list[list[int]]:
    """The pairs of each expert."""
    offsets = permutation.offsets.tolist()
    return [permutation.pairs[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_permute(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_permute, "TILE", 4)  # several of them
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, 3, (rows, 3), generator=generator, dtype=torch.int32).to(DEVICE)
    got, want = permute(ids, 5), permute_ref(ids, 5)  # nobody asks experts 3 and 4
    assert torch.equal(got.offsets, want.offsets)
    assert rows_of(got) == rows_of(want)
    assert torch.equal(got.places, want.places)


@dtypes
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("n_in", "n_out"), [(FEW.columns, FEW.outs), (FEW.columns + 8, FEW.outs + 3), (24, 7)]
)
def test_grouped_linear(n_in: int, n_out: int, gather: bool, dtype: torch.dtype) -> None:
    # Expert 0 has two tiles of rows, 1 none, 2 three rows, 3 the rest.
    first = [0] * (FEW.rows + 1) + [2] * 3 + [3] * 4
    ids = torch.tensor([[e, -1] for e in first], dtype=torch.int32, device=DEVICE)
    permutation = permute_ref(ids, 5)
    x = draw(len(ids) if gather else ids.numel(), n_in, dtype=dtype)
    weight = draw(5, n_out, n_in, dtype=dtype, seed=1)
    got = grouped_linear(x, weight, permutation, gather=gather)[: len(first)]
    want = grouped_linear_ref(x, weight, permutation, gather=gather)[: len(first)]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * n_in**0.5)


@pytest.mark.parametrize(("pairs", "experts"), [(1, 256), (130, 3), (64, 1), (1000, 7)])
def test_there_are_programs_for_all_tiles(pairs: int, experts: int) -> None:
    worst = [1] * min(experts, pairs)  # as many partial tiles as there can be
    worst[0] += pairs - sum(worst)
    for tile in (FEW, MANY):
        assert sum(-(-n // tile.rows) for n in worst) <= most_tiles(pairs, experts, tile.rows)
        assert most_tiles(pairs, experts, tile.rows) <= pairs


@dtypes
def test_combine(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_combine, "TILE", 32)
    places = torch.tensor([[2, 0], [-1, 3], [1, -1]], dtype=torch.int32, device=DEVICE)
    y, residual = draw(5, 50, dtype=dtype), draw(3, 50, dtype=dtype, seed=1)
    weights = draw(3, 2, seed=2)
    got, want = (f(y, places, weights, residual) for f in (combine, combine_ref))
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def layer(
    hidden: int, width: int, routing: Routing, *, dtype: torch.dtype, fp8: bool = False
) -> Experts:
    gate_up = draw(routing.experts, 2 * width, hidden, seed=1) * hidden**-0.5
    down = draw(routing.experts, hidden, width, seed=2) * width**-0.5
    return Experts(
        gate=draw(routing.experts, hidden, seed=3) * hidden**-0.5,
        bias=draw(routing.experts, seed=4) * 0.1,
        counts=torch.zeros(routing.experts, dtype=torch.int64, device=DEVICE),
        gate_up=quantised(gate_up) if fp8 else gate_up.to(dtype),
        down=quantised(down) if fp8 else down.to(dtype),
        routing=routing,
        dispatch=SingleRank(),
    )


def quantised(weights: torch.Tensor) -> Fp8Experts:
    def one(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = [-(-size // 128) for size in weight.shape]
        scale = torch.full(blocks, 1 / 64, device=weight.device)
        return (weight * 64).to(torch.float8_e4m3fn), scale

    return fp8_experts([fp8_matrix([one(weight)]) for weight in weights])


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_moe(rows: int, dtype: torch.dtype) -> None:
    experts = layer(40, 24, routing_of(8, 3, 4, 2), dtype=dtype)
    x, residual = draw(rows, 40, dtype=dtype), draw(rows, 40, dtype=dtype, seed=5)
    got, want = moe(x, experts, residual), moe_ref(x, experts, residual)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@NEEDS_E4M3
def test_moe_with_e4m3_experts() -> None:
    experts = layer(136, 24, routing_of(4, 2), dtype=torch.float32, fp8=True)
    x, residual = draw(5, 136), draw(5, 136, seed=5)
    got, want = moe(x, experts, residual), moe_ref(x, experts, residual)
    # A last bit of float32 between the two products may change one of e4m3's roundings: 1/16 of one of 24 terms.
    torch.testing.assert_close(got, want, rtol=0, atol=0.02)
    assert (got - want).abs().mean() < 1e-3


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=NEEDS_E4M3)])
def test_a_row_of_moe_does_not_depend_on_the_others(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (moe_grouped_linear, fp8_grouped_linear):
        monkeypatch.setattr(module, "FEW", dataclasses.replace(module.FEW, rows=16))
    experts = layer(40, 24, routing_of(4, 2), dtype=torch.float32, fp8=fp8)
    x, residual = draw(40, 40), draw(40, 40, seed=5)
    together = moe(x, experts, residual)
    for row in (0, 39):
        alone = moe(x[row : row + 1].contiguous(), experts, residual[row : row + 1].contiguous())
        assert torch.equal(alone[0], together[row])

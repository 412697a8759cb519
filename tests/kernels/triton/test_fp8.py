"""Block-scaled e4m3 products in Triton against their torch references, and to the bit against themselves.

Quantisation is exact on both sides. Products of e4m3 values are exact in float32, so sums differ by their order only:
some 1e-6 relative to the size of the terms. Tensor cores of compute capability 9.0 keep fewer bits within 128 columns:
1.07e-3 was seen on an H100.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.dense.fp8_linear import (
    TILE,
    Fp8Matrix,
    fp8_linear,
    fp8_linear_ref,
    fp8_matrix,
)
from headrace_kernels.dense.fp8_quantise import BLOCK, quantise_rows, quantise_rows_ref
from headrace_kernels.moe.fp8_grouped_linear import (
    fp8_experts,
    fp8_grouped_linear,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.permute import permute_ref
from helpers.kernels.e4m3 import NEEDS_E4M3, e4m3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RELATIVE = 2e-3 if torch.cuda.is_available() else 2e-6
pytestmark = [NEEDS_E4M3, pytest.mark.matrix]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
ROUNDING = {
    torch.float32: 0.0,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}  # one step of a result


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def draw_matrix(heights: list[int], n_in: int, seed: int = 0) -> Fp8Matrix:
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, height in enumerate(heights):
        blocks = (-(-height // BLOCK), -(-n_in // BLOCK))
        weight = e4m3(draw(height, n_in, seed=seed + i) * 100)
        parts.append((weight, draw(*blocks, seed=seed + 50 + i).abs() / 100))
    return fp8_matrix(parts)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    size = want.float().abs().max().item()
    torch.testing.assert_close(
        got.float(), want.float(), rtol=ROUNDING[want.dtype], atol=RELATIVE * size
    )


@dtypes
@pytest.mark.parametrize("width", [1, BLOCK, BLOCK + 1, 8 * BLOCK + 5])
def test_quantise_rows_is_exact(width: int, dtype: torch.dtype) -> None:
    x = draw(6, width + 4, dtype=dtype)[:, 4:]
    x *= torch.tensor([1e-5, 1.0, 300.0, 0.0, 7.0, 1e-2], device=DEVICE)[:, None].to(dtype)
    values, scale = quantise_rows(x)
    want_values, want_scale = quantise_rows_ref(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(values.float(), want_values.float())
    alone, scale_alone = quantise_rows(x[1:2])
    assert torch.equal(alone.float(), values[1:2].float()) and torch.equal(scale_alone, scale[1:2])


@dtypes
@pytest.mark.parametrize("rows", [0, 1, TILE.rows + 1])
@pytest.mark.parametrize(("heights", "n_in"), [([128], 128), ([130, 7], 200), ([3], 5)])
def test_fp8_linear(rows: int, heights: list[int], n_in: int, dtype: torch.dtype) -> None:
    x, matrix = draw(rows, n_in, dtype=dtype), draw_matrix(heights, n_in)
    got = fp8_linear(x, matrix)
    assert got.shape == (rows, sum(heights)) and got.dtype == dtype
    if rows:
        close(got, fp8_linear_ref(x, matrix))


def test_a_row_of_an_fp8_product_does_not_depend_on_the_others() -> None:
    x, matrix = draw(TILE.rows + 20, 200), draw_matrix([70], 200)
    x[5] *= 1e6  # a stranger whose values are much larger
    together = fp8_linear(x, matrix)
    for row in (0, TILE.rows - 1, TILE.rows + 19):
        assert torch.equal(fp8_linear(x[row : row + 1], matrix)[0], together[row])


@dtypes
@pytest.mark.parametrize("gather", [True, False])
def test_fp8_grouped_linear(gather: bool, dtype: torch.dtype) -> None:
    # Expert 0 has two tiles of rows, 1 none, 2 three rows, 3 one.
    first = [0] * (TILE.rows + 1) + [2] * 3 + [3]
    ids = torch.tensor([[-1, e] for e in first], dtype=torch.int32, device=DEVICE)
    permutation = permute_ref(ids, 4)
    experts = fp8_experts([draw_matrix([40, 33], 200, seed=100 * e) for e in range(4)])
    x = draw(len(ids) if gather else ids.numel(), 200, dtype=dtype)
    got = fp8_grouped_linear(x, experts, permutation, gather=gather)[: len(first)]
    want = fp8_grouped_linear_ref(x, experts, permutation, gather=gather)[: len(first)]
    close(got, want)
    for start, end in itertools.pairwise(permutation.offsets.tolist()):
        assert start == end or got[start:end].any()

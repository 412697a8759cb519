"""Products whose columns are cut into parts: the bits of a row are one, whoever adds the parts up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.dense import linear as linear_module
from headrace_kernels.dense import parts
from headrace_kernels.dense.fp8_linear import TILE, fp8_linear, fp8_linear_ref, fp8_matrix
from headrace_kernels.dense.linear import MANY, linear, tile_of
from headrace_kernels.dense.parts import MOST_PROGRAMS, PROGRAMS, Parts, part_bytes, parts_of
from headrace_kernels.dense.sum_parts import sum_parts, sum_parts_ref
from helpers.kernels.e4m3 import NEEDS_E4M3, e4m3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
# Columns: one part; parts of one length; a last one that is shorter, and ends within a tile.
SHAPES = [(7, 40), (40, 512), (33, 9 * 64 + 24), (70, 17 * 64)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, multiply: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part a program of its own, and all parts by one program."""
    found: list[torch.Tensor] = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(parts, "MOST_PROGRAMS", most)
        found.append(multiply())
    return found[0], found[1]


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_out", "n_in"), SHAPES)
def test_a_product_is_the_same_split_or_whole(
    n_out: int, n_in: int, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = draw(rows, n_in, dtype=dtype), draw(n_out, n_in, dtype=dtype, seed=1)
    split, whole = both_ways(monkeypatch, lambda: linear(x, weight))
    assert torch.equal(split, whole)
    want = x.double() @ weight.double().T
    relative = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(split.double(), want, rtol=relative, atol=relative * n_in**0.5)


@NEEDS_E4M3
@pytest.mark.parametrize(("n_out", "n_in"), [(7, 40), (40, 1024), (33, 9 * 128 + 24)])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_a_quantised_product_is_the_same_split_or_whole(
    n_out: int, n_in: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = draw(1, -(-n_in // 128), seed=2).abs()
    weight = e4m3(draw(n_out, n_in, seed=1) * 100)
    x, matrix = draw(rows, n_in, dtype=torch.bfloat16), fp8_matrix([(weight, scale)])
    split, whole = both_ways(monkeypatch, lambda: fp8_linear(x, matrix))
    assert torch.equal(split, whole)
    want = fp8_linear_ref(x, matrix)
    # Of a sum of e4m3 products Hopper's tensor cores keep some 14 bits (DeepSeek-V3 2024, 3.3.2).
    cut = 2e-3 * float(want.abs().max()) if rows and DEVICE.type == "cuda" else 0.0
    torch.testing.assert_close(split, want, rtol=2**-6, atol=max(1e-2 * n_in**0.5, cut))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", pytest.param("e4m3", marks=NEEDS_E4M3)])
def test_a_row_does_not_depend_on_the_rows_that_make_a_product_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    tile = TILE if kind == "e4m3" else tile_of(dtype.itemsize)
    n_out, n_in = 2 * tile.outs - 14, 12 * tile.columns
    monkeypatch.setattr(parts, "MOST_PROGRAMS", 6)  # three parts of two tiles of outputs
    cut = parts_of(2, 12)
    assert cut.count == 3 and cut.split(2) and not cut.split(2 * -(-70 // tile.rows))
    x, weight = draw(70, n_in, dtype=dtype), draw(n_out, n_in, dtype=dtype, seed=1)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        if kind != "e4m3":
            return linear(rows, weight)
        scale = torch.ones(-(-n_out // 128), 12, device=DEVICE)
        return fp8_linear(rows, fp8_matrix([(e4m3(weight.float() * 100), scale)]))

    together = multiply(x)
    for row in (0, 31, 69):
        assert torch.equal(multiply(x[row : row + 1].contiguous())[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_out", "n_in"), [(150, 64), (300, 9 * 64 + 24)])
def test_a_row_among_many_is_what_it_is_alone(
    n_out: int, n_in: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of many rows are larger; a GPU gives the same bits, and the interpreter's products may not."""
    monkeypatch.setattr(parts, "MOST_PROGRAMS", 0)
    monkeypatch.setattr(linear_module, "ENOUGH", 1)
    many, few = MANY[dtype.itemsize], tile_of(dtype.itemsize)
    rows = 2 * many.rows + 3
    x, weight = draw(rows, n_in, dtype=dtype), draw(n_out, n_in, dtype=dtype, seed=1)
    together = linear(x, weight)
    monkeypatch.setattr(linear_module, "MANY", linear_module.FEW)
    apart = linear(x, weight)
    assert many.rows > few.rows
    if DEVICE.type == "cuda":
        assert torch.equal(together, apart)
        assert torch.equal(linear(x[-1:].contiguous(), weight)[0], together[-1])
    want = x.double() @ weight.double().T
    relative = 1e-5 if dtype == torch.float32 else 2**-8
    for found in (together, apart):
        torch.testing.assert_close(found.double(), want, rtol=relative, atol=relative * n_in**0.5)


def test_every_tile_has_its_program() -> None:
    """Also where tiles of rows are more or fewer than those that run together."""
    for rows, outs in product([1, 64, 65, 8 * 64, 8 * 64 + 1, 20 * 64], [1, 64, 65, 5 * 64]):
        x, weight = draw(rows, 8), draw(outs, 8, seed=1)
        torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (5, 300), (2, 7, 40)])
def test_parts_are_added_in_their_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sums = draw(*shape) * 10.0 ** draw(*shape, seed=1).round()
    got, want = (
        f(sums, sums.new_empty(shape[1:], dtype=dtype)) for f in (sum_parts, sum_parts_ref)
    )
    assert torch.equal(got, want)


def test_parts_cover_the_columns_and_none_is_empty() -> None:
    for out_tiles, steps in product(
        [0, 1, 3, 33, 112, 255, 256, 2020], [0, 1, 3, 4, 7, 8, 56, 112, 113]
    ):
        cut = parts_of(out_tiles, steps)
        assert cut.count >= (steps > 0)
        assert (cut.count - 1) * cut.steps < max(steps, 1) <= max(cut.count * cut.steps, 1)
        if cut.count > 1:
            assert cut.steps >= 4 and cut.count * out_tiles <= PROGRAMS
    assert parts_of(8, 112) == Parts(28, 4)  # the router of DeepSeek-R1
    assert parts_of(33, 56) == Parts(7, 8)  # what makes its latents
    assert parts_of(2020, 112) == Parts(1, 112)  # its head


def test_what_sums_take_is_bounded_and_grows_with_the_rows_until_there_are_enough() -> None:
    tile = tile_of(4)
    assert part_bytes(1, 256, 7168, tile) == 28 * 256 * 4
    most = part_bytes(1 << 20, 256, 7168, tile)
    rows = MOST_PROGRAMS // (8 * 28) * tile.rows
    assert most == part_bytes(rows, 256, 7168, tile) == 28 * rows * 256 * 4
    assert part_bytes(rows, 129_280, 7168, tile_of(2)) == 0
    # No rows; a model without shared experts, or without queries of low rank.
    for nothing in ((0, 256, 7168), (5, 0, 7168), (5, 256, 0)):
        assert part_bytes(*nothing, tile) == 0
    for n_out, n_in in product([64, 2_112, 7_168, 16_384], [512, 7_168, 18_432]):
        assert part_bytes(1 << 20, n_out, n_in, TILE) <= MOST_PROGRAMS * TILE.rows * TILE.outs * 4

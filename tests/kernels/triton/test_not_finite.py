"""A NaN or an infinity shows in what every kernel of the FP8 path makes of its row, and in no other row.

Where one is dropped, a request gets made-up text instead of the failure that the sampler gives it by name.
"""
# pyright: reportArgumentType=false
# a tl.constexpr is given as a plain value

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from headrace_kernels.attention import mla_attention as absorbed
from headrace_kernels.attention import mla_prefill as prefill
from headrace_kernels.attention.head_linear import head_linear, head_linear_ref
from headrace_kernels.attention.merge_spans import merge_spans, merge_spans_ref
from headrace_kernels.attention.mla_store import mla_store, mla_store_ref
from headrace_kernels.dense.fp8_linear import Fp8Matrix, fp8_linear, fp8_linear_ref, fp8_matrix
from headrace_kernels.dense.fp8_quantise import BLOCK, quantise_rows, quantise_rows_ref
from headrace_kernels.dense.linear import linear, linear_ref
from headrace_kernels.dense.rms_norm import rms_norm, rms_norm_ref
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_ref
from headrace_kernels.interpret import INTERPRET, narrow, widen
from headrace_kernels.moe.combine import combine, combine_ref
from headrace_kernels.moe.fp8_grouped_linear import (
    Fp8Experts,
    fp8_experts,
    fp8_grouped_linear,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.grouped_linear import grouped_linear, grouped_linear_ref
from headrace_kernels.moe.permute import permute_ref
from headrace_kernels.moe.route import route, route_ref
from headrace_kernels.ops import Routing
from headrace_kernels.torch_mla import TRITON
from helpers.kernels.e4m3 import NEEDS_E4M3, e4m3
from helpers.models.broken_deepseek import (
    NOT_FINITE,
    PROMPT,
    BrokenDeepseek,
    outcomes,
    spoil_cache,
    torch_engine,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
BAD = (NAN, INF, -INF)
Rows: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [
    pytest.mark.matrix,
    NEEDS_E4M3,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]
bad_values = pytest.mark.parametrize("bad", BAD, ids=str)
caches = pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_shows_in_its_row(run: Rows, x: torch.Tensor, at: tuple[int, ...], bad: float) -> None:
    """`run` on rows `x` with `bad` in one place: its row has something that is not finite, the others are as before."""
    before = run(x.clone()).float()
    assert before.isfinite().all()
    spoiled = x.clone()
    spoiled[at] = bad
    after = run(spoiled).float()
    assert not after[at[0]].isfinite().all()
    others = [row for row in range(len(x)) if row != at[0]]
    assert torch.equal(after[others], before[others])


# --- from type to type ---


@triton.jit
def _convert_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    y_ptr,  # noqa: ANN001
    back_ptr,  # noqa: ANN001
    count: tl.constexpr,
    interpret: tl.constexpr,
):
    i = tl.arange(0, count)
    y = narrow(tl.load(x_ptr + i), y_ptr.dtype.element_ty, interpret)
    tl.store(y_ptr + i, y)
    tl.store(back_ptr + i, widen(y, tl.float32, interpret))


@triton.jit
def _widen_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    y_ptr,  # noqa: ANN001
    count: tl.constexpr,
    interpret: tl.constexpr,
):
    i = tl.arange(0, count)
    tl.store(y_ptr + i, widen(tl.load(x_ptr + i), y_ptr.dtype.element_ty, interpret))


def converted(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    y, back = torch.empty_like(x, dtype=dtype), torch.empty_like(x)
    _convert_kernel[(1,)](x, y, back, count=len(x), interpret=INTERPRET)
    return y, back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, E4M3], ids=str)
def test_rounding_and_reading_keep_what_is_not_finite(dtype: torch.dtype) -> None:
    # NaN of every payload: adding to one as if it were a number may carry it over into another number
    odd = [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, 0x7FC00000, -0x400000, 0x7F808000, 0x7FBFFFFF]
    nans = torch.tensor(odd, dtype=torch.int32, device=DEVICE).view(torch.float32)
    x = torch.cat(
        (nans, torch.tensor([INF, -INF, 0.0, -0.0, 1.0, -3.5, 448.0, 1e9], device=DEVICE))
    )
    y, back = converted(x, dtype)
    assert y[:8].float().isnan().all()
    if dtype == E4M3:
        assert y[8:10].float().isnan().all()
        assert back[10:].tolist() == [0, 0, 1.0, -3.5, 448.0, 448.0]
    else:
        assert y[8:10].float().tolist() == [INF, -INF]
        assert back[10:15].tolist() == [0, 0, 1.0, -3.5, 448.0]
    torch.testing.assert_close(back, y.float(), rtol=0, atol=0, equal_nan=True)


def test_every_value_of_e4m3_is_read_as_what_it_is() -> None:
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(E4M3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = torch.empty(256, dtype=dtype, device=DEVICE)
        _widen_kernel[(1,)](stored, y, count=256, interpret=INTERPRET)
        torch.testing.assert_close(y.float(), stored.float(), rtol=0, atol=0, equal_nan=True)


# --- products of e4m3 ---


@bad_values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantise_rows(dtype: torch.dtype, bad: float) -> None:
    """The scale shows it as well as the values, in the kernel as in the reference."""
    x = draw(4, 3 * BLOCK + 5, dtype=dtype)
    before_values, before_scale = quantise_rows(x)
    x[1, BLOCK + 7] = bad
    x[2, 3 * BLOCK + 4] = bad
    values, scale = quantise_rows(x)
    want_values, want_scale = quantise_rows_ref(x)
    torch.testing.assert_close(scale, want_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.float(), want_values.float(), rtol=0, atol=0, equal_nan=True)
    assert scale[1, 1].isnan() and scale[2, 3].isnan()
    assert values[1, BLOCK : 2 * BLOCK].float().isnan().all()
    assert values[2, 3 * BLOCK :].float().isnan().all()
    assert scale.isnan().sum() == 2
    assert torch.equal(values[0].float(), before_values[0].float())
    assert torch.equal(scale[3], before_scale[3])


def a_matrix(n_out: int, n_in: int, seed: int = 0) -> Fp8Matrix:
    blocks = (-(-n_out // BLOCK), -(-n_in // BLOCK))
    weight = e4m3(draw(n_out, n_in, seed=seed) * 100)
    return fp8_matrix([(weight, draw(*blocks, seed=seed + 50).abs() / 100)])


@bad_values
@pytest.mark.parametrize("run", [fp8_linear, fp8_linear_ref])
def test_fp8_linear_by_activation(run: Callable[..., torch.Tensor], bad: float) -> None:
    matrix = a_matrix(40, 200)
    assert_shows_in_its_row(lambda x: run(x, matrix), draw(5, 200), (3, 150), bad)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("run", [fp8_linear, fp8_linear_ref])
def test_fp8_linear_by_weight(run: Callable[..., torch.Tensor], code: int) -> None:
    matrix, x = a_matrix(40, 200), draw(5, 200)
    before = run(x, matrix)
    matrix.weight.view(torch.uint8)[7, 150] = code
    after = run(x, matrix)
    assert after[:, 7].isnan().all()
    others = [column for column in range(40) if column != 7]
    assert torch.equal(after[:, others], before[:, others])
    matrix = a_matrix(40, 200)
    matrix.scale[0, 1] = NAN
    assert run(x, matrix).isnan().all()


@bad_values
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("run", [fp8_grouped_linear, fp8_grouped_linear_ref])
def test_fp8_grouped_linear(run: Callable[..., torch.Tensor], gather: bool, bad: float) -> None:
    ids = integers([0, 0, 2, 2]).view(4, 1)
    permutation = permute_ref(ids, 3)
    experts = fp8_experts([a_matrix(40, 200, seed=100 * e) for e in range(3)])
    assert_shows_in_its_row(
        lambda x: run(x, experts, permutation, gather=gather), draw(4, 200), (1, 150), bad
    )
    codes = experts.weight.view(torch.uint8)
    codes[2, 7, 150] = 0x7F
    spoiled = Fp8Experts(codes.view(E4M3), experts.scale, experts.row_block)
    after = run(draw(4, 200), spoiled, permutation, gather=gather)
    assert after[2:, 7].isnan().all()
    assert after.isnan().sum() == 2


# --- other products, norms, experts ---


@bad_values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reference", [False, True])
def test_products_norms_and_activations(reference: bool, dtype: torch.dtype, bad: float) -> None:
    weight, norm = draw(24, 40, dtype=dtype, seed=1), draw(40, dtype=dtype, seed=2)
    heads = draw(2, 20, 9, dtype=dtype, seed=3)
    permutation = permute_ref(integers([0, 1, 1, 0, 2]).view(5, 1), 3)
    experts = draw(3, 24, 40, dtype=dtype, seed=4)
    kernels: list[tuple[Rows, Rows]] = [
        (lambda x: linear(x, weight), lambda x: linear_ref(x, weight)),
        (lambda x: rms_norm(x, norm, 1e-6), lambda x: rms_norm_ref(x, norm, 1e-6)),
        (silu_mul, silu_mul_ref),
        (
            lambda x: head_linear(x.view(-1, 2, 20), heads),
            lambda x: head_linear_ref(x.view(-1, 2, 20), heads),
        ),
        (
            lambda x: grouped_linear(x, experts, permutation, gather=True)[
                permutation.places[:, 0]
            ],
            lambda x: grouped_linear_ref(x, experts, permutation, gather=True)[
                permutation.places[:, 0]
            ],
        ),
    ]
    for pair in kernels:
        for at in ((3, 0), (3, 39)):
            assert_shows_in_its_row(pair[reference], draw(5, 40, dtype=dtype), at, bad)


ROUTINGS = [
    Routing(experts=8, top_k=3, groups=4, top_groups=2, normalise=True, scale=2.5),
    Routing(experts=6, top_k=2, groups=1, top_groups=1, normalise=False, scale=1.0),
    Routing(experts=4, top_k=4, groups=2, top_groups=2, normalise=True, scale=1.0),
]


@bad_values
@pytest.mark.parametrize("routing", ROUTINGS)
def test_route(routing: Routing, bad: float) -> None:
    """Also where the expert is not among the best: what would come of it is not known."""
    logits, bias = draw(routing.experts + 1, routing.experts), draw(routing.experts, seed=1)
    before = route(logits, bias, routing)
    for expert in range(routing.experts):
        logits[expert, expert] = bad
    for run in (route, route_ref):
        ids, weights = run(logits, bias, routing)
        assert weights[:-1].isnan().all()
        assert torch.equal(ids[-1], before[0][-1])
        torch.testing.assert_close(weights[-1], before[1][-1])
        assert (ids.diff(dim=1) > 0).all()  # experts all the same, and none of them twice
        assert ids.min() >= 0 and ids.max() < routing.experts
    assert torch.equal(route(logits, bias, routing)[0], route_ref(logits, bias, routing)[0])
    bias[0] = bad
    for run in (route, route_ref):
        assert run(logits, bias, routing)[1].isnan().all()


@bad_values
@pytest.mark.parametrize("run", [combine, combine_ref])
def test_combine(run: Callable[..., torch.Tensor], bad: float) -> None:
    places, weights = integers([0, 1, 2, 3, 4, 5]).view(3, 2), draw(3, 2)
    y, residual = draw(6, 10), draw(3, 10, seed=1)
    before = run(y, places, weights, residual)
    for which, at in ((0, (3, 4)), (1, (1, 1)), (2, (1, 4))):  # an expert, a weight, the residual
        its = [y.clone(), weights.clone(), residual.clone()]
        its[which][at] = bad
        after = run(its[0], places, its[1], its[2])
        assert not after[1].isfinite().all()
        assert torch.equal(after[[0, 2]], before[[0, 2]])


# --- latent attention ---

TOKENS = 8  # of a block
HEADS, NOPE, ROPE, LORA, V = 3, 10, 8, 24, 12


@bad_values
@caches
@pytest.mark.parametrize("part", ["latent", "key", "query"])
@pytest.mark.parametrize("run", [mla_store, mla_store_ref])
def test_mla_store(
    run: Callable[..., torch.Tensor], part: str, cache_dtype: torch.dtype, bad: float
) -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        """What became of each row: its place in the cache, its queries."""
        cache = torch.zeros(4, TOKENS, LORA + ROPE, device=DEVICE).to(cache_dtype)
        slots = integers([31, 0, 7, 8, 3], torch.int64)
        q, latent = x[:, : HEADS * (NOPE + ROPE)], x[:, HEADS * (NOPE + ROPE) :]
        turned = run(
            q.unflatten(1, (HEADS, -1)), latent, draw(LORA, dtype=x.dtype, seed=2), 1e-6,
            draw(50, ROPE, seed=3), integers([0, 49, 3, 4, 4]), slots, cache, rope_interleave=True,
        )  # fmt: skip
        return torch.cat((turned.flatten(1).float(), cache.flatten(0, 1)[slots].float()), dim=1)

    queries = HEADS * (NOPE + ROPE)
    at = {"query": NOPE + 1, "latent": queries + 5, "key": queries + LORA + 1}[part]
    x = draw(5, queries + LORA + ROPE, dtype=torch.bfloat16)
    assert_shows_in_its_row(rows, x, (3, at), bad)


def attend(
    cache: torch.Tensor, q: torch.Tensor, positions: list[int], first_key: int, way: str
) -> torch.Tensor:
    """Rows of one sequence, whose blocks follow one another in the cache."""
    kv_b = draw(HEADS, NOPE + V, LORA, dtype=q.dtype, seed=4) * LORA**-0.5
    tables, first = integers(list(range(len(cache)))).view(1, -1), integers([first_key])
    if way.startswith("absorbed"):
        at = np.array(positions, dtype=np.int32)
        kernel = absorbed.mla_attention_ref if way.endswith("ref") else absorbed.mla_attention
        return kernel(
            q, kv_b, cache, tables, integers([0] * len(q)), integers(positions), first,
            scale=0.2, plan=absorbed.attention_plan(at, heads=HEADS, kv_lora=LORA, device=DEVICE),
        )  # fmt: skip
    plan = prefill.prefill_plan([0, len(q)], [positions[-1] + 1], DEVICE)
    kernel = prefill.mla_prefill_ref if way.endswith("ref") else prefill.mla_prefill
    return kernel(q, kv_b, cache, tables, first, plan, scale=0.2)


WAYS = ("absorbed", "absorbed ref", "expanded", "expanded ref")


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a context of some tens of tokens has several, and several tiles."""
    for module in (absorbed, prefill):
        monkeypatch.setattr(module, "SPAN", 32)
        monkeypatch.setattr(module, "KV_TILE", 16)


@pytest.mark.usefixtures("short_spans")
@caches
@pytest.mark.parametrize("place", [0, LORA + ROPE - 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_nan_in_the_cache_is_seen_by_all_rows_that_see_its_token(
    way: str, place: int, cache_dtype: torch.dtype
) -> None:
    """Whichever span it is in; a row before it in the same step does not see it."""
    dtype = torch.float32 if cache_dtype == E4M3 else cache_dtype
    q = draw(1, HEADS, NOPE + ROPE, dtype=dtype)
    for token in (0, 33, 39):
        cache = draw(9, TOKENS, LORA + ROPE, dtype=dtype, seed=1).to(cache_dtype)
        before = attend(cache, q, [token - 1], 0, way) if token else None
        cache.view(-1, LORA + ROPE)[token, place] = NAN
        assert attend(cache, q, [39], 0, way).isnan().any()
        if before is not None:
            assert torch.equal(attend(cache, q, [token - 1], 0, way), before)


@pytest.mark.usefixtures("short_spans")
@bad_values
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_query_shows_in_its_row(way: str, bad: float) -> None:
    cache = draw(9, TOKENS, LORA + ROPE, seed=1)
    positions = [33, 34, 35]
    for at in (0, NOPE + ROPE - 1):
        assert_shows_in_its_row(
            lambda q: attend(cache, q, positions, 0, way),
            draw(3, HEADS, NOPE + ROPE),
            (1, 2, at),
            bad,
        )


@pytest.mark.usefixtures("short_spans")
@caches
@pytest.mark.parametrize("way", WAYS)
def test_what_others_left_in_the_cache_is_not_seen(way: str, cache_dtype: torch.dtype) -> None:
    """Before the first key, and behind the newest token, there may be anything."""
    dtype = torch.float32 if cache_dtype == E4M3 else cache_dtype
    cache = draw(9, TOKENS, LORA + ROPE, dtype=dtype, seed=1).to(cache_dtype)
    q = draw(3, HEADS, NOPE + ROPE, dtype=dtype)
    before = attend(cache, q, [55, 56, 57], 37, way)
    rows = cache.view(-1, LORA + ROPE)
    rows[:37] = NAN
    rows[58:] = NAN
    assert torch.equal(attend(cache, q, [55, 56, 57], 37, way), before)


@bad_values
@pytest.mark.parametrize("run", [merge_spans, merge_spans_ref])
def test_merge_spans(run: Callable[..., torch.Tensor], bad: float) -> None:
    lse = draw(5, 3, seed=1) * 20
    of_rows = integers([0, 3, 6, 9, 12, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3]).view(3, 5)

    def rows(part: torch.Tensor) -> torch.Tensor:
        out = torch.empty(5, 1, 7, device=DEVICE)
        return run(part.view(15, 1, 7), lse.view(15, 1), of_rows, out)

    assert_shows_in_its_row(rows, draw(5, 3, 7), (2, 1, 3), bad)
    lse[2, 1] = -INF  # as where the sum of the weights is no number
    part = draw(5, 3, 7)
    part[2, 1] = NAN
    assert rows(part)[2].isnan().all()


# --- a model made of them ---


@pytest.mark.usefixtures("short_spans")
def test_a_nan_in_a_weight_fails_the_request(tmp_path: Path) -> None:
    spoiled = BrokenDeepseek(tmp_path).write("layers.1.mlp.experts.*.up_proj.weight")
    engine = torch_engine(spoiled, TRITON, DEVICE.type)
    assert outcomes(engine, PROMPT, max_tokens=1) == [NOT_FINITE]


@pytest.mark.thorough
@pytest.mark.usefixtures("short_spans")
def test_a_nan_in_an_e4m3_cache_fails_those_who_read_it(tmp_path: Path) -> None:
    engine = torch_engine(BrokenDeepseek(tmp_path).write(), TRITON, DEVICE.type)
    (sound,) = outcomes(engine, PROMPT, max_tokens=1)
    assert len(sound) == 1
    spoil_cache(engine)
    assert outcomes(engine, PROMPT, max_tokens=1) == [NOT_FINITE]  # its prefix is cached
    assert outcomes(engine, PROMPT, max_tokens=1, salt=b"new") == [sound]

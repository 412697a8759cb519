"""Latent attention's Triton kernels against their torch references, and to the bit against themselves.

Tolerances: float32 sums of a few hundred terms in another order differ by some 1e-6 relative; float16 and bfloat16
results by one or two roundings, as the latent query is rounded on its way.
"""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.attention import mla_attention as absorbed
from headrace_kernels.attention import mla_prefill as prefill
from headrace_kernels.attention import span_plan
from headrace_kernels.attention.head_linear import (
    IN_TILE,
    OUT_TILE,
    ROWS_TILE,
    head_linear,
    head_linear_ref,
)
from headrace_kernels.attention.merge_spans import merge_spans, merge_spans_ref
from headrace_kernels.attention.mla_store import mla_store, mla_store_ref
from helpers.kernels.e4m3 import NEEDS_E4M3

pytestmark = pytest.mark.matrix
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
E4M3 = torch.float8_e4m3fn
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
BLOCK_TOKENS = 8


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a context of some hundred tokens has several."""
    monkeypatch.setattr(absorbed, "SPAN", 64)
    monkeypatch.setattr(prefill, "SPAN", 64)


@dtypes
@pytest.mark.parametrize("rows", [1, ROWS_TILE + 1])
@pytest.mark.parametrize(
    ("n_in", "n_out"), [(IN_TILE, OUT_TILE), (IN_TILE + 8, OUT_TILE + 3), (0, 5)]
)
def test_head_linear(rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    x = draw(rows, 3, n_in + 5, dtype=dtype)[..., :n_in]
    weight = draw(3, n_out, n_in, dtype=dtype, seed=1).transpose(1, 2)
    got, want = head_linear(x, weight), head_linear_ref(x, weight)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(n_in, 1) ** 0.5)
    assert torch.equal(head_linear(x[:1], weight), got[:1])


def test_merge_spans_leaves_out_those_that_saw_nothing() -> None:
    part, lse = draw(16, 5, 7), draw(16, 5, seed=1) * 20
    lse[0, 1] = lse[:, 2] = lse[6, 3] = -torch.inf
    # of three rows beside one another; of a row alone, whose spans follow one another; of a row without any
    rows = integers([0, 1, 2, 9, 0, 3, 3, 3, 1, 1, 3, 3, 3, 7, 0]).view(3, 5)
    want = merge_spans_ref(part, lse, rows, torch.empty(5, 5, 7, device=DEVICE))
    got = merge_spans(part, lse, rows, torch.empty_like(want))
    close(got, want)
    assert not got[:, 2].any() and not got[4].any()
    some = merge_spans(part, lse, rows, torch.empty_like(want[1:4]), first_row=1)
    assert torch.equal(some, got[1:4])
    fewer = integers([0, 3, 2]).view(3, 1)  # but not the last one, which saw nothing
    assert torch.equal(merge_spans(part, lse, fewer, torch.empty_like(want[:1]))[0, 3], got[0, 3])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "kv_lora"), [(3, 10, 8, 24), (1, 0, 6, 33), (2, 4, 64, 64)]
)
def test_mla_store(
    heads: int, nope: int, rope: int, kv_lora: int, interleave: bool, cache_dtype: torch.dtype
) -> None:
    close(*store_both(heads, nope, rope, kv_lora, interleave, cache_dtype))


@NEEDS_E4M3
@pytest.mark.parametrize("interleave", [True, False])
def test_mla_store_in_e4m3(interleave: bool) -> None:
    got, want = (x.float() for x in store_both(3, 10, 8, 24, interleave, E4M3))
    # A last bit of float32 may fall on the other side of a rounding, which is one of e4m3's steps.
    assert ((got - want).abs() <= want.abs() / 8 + 2**-9).all()
    assert (got == want).float().mean() > 0.99
    assert (want.abs() == 448).any()  # what is too large is cut off


def store_both(
    heads: int, nope: int, rope: int, kv_lora: int, interleave: bool, cache_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache of the kernel and of the reference; queries are compared here."""
    dtype = torch.float16 if cache_dtype == E4M3 else cache_dtype
    rows, blocks = 5, 4
    # slices of wider buffers, as fused projections give them
    wide_q = draw(rows, heads * (nope + rope) + 6, dtype=dtype)
    wide_latent = draw(rows, kv_lora + rope + 3, dtype=dtype, seed=1)
    norm = draw(kv_lora, dtype=dtype, seed=2)
    norm[0] = 1000.0
    cos_sin = draw(50, rope, seed=3)
    positions, slots = integers([0, 49, 3, 4, 4]), integers([31, 0, 7, 8, 3], torch.int64)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for function in (mla_store, mla_store_ref):
        cache = draw(blocks, BLOCK_TOKENS, kv_lora + rope, dtype=dtype, seed=4).to(cache_dtype)
        q = wide_q.clone()[:, 6:].unflatten(1, (heads, -1))
        latent = wide_latent[:, 3:]
        turned = function(
            q, latent, norm, 1e-6, cos_sin, positions, slots, cache, rope_interleave=interleave
        )
        results.append((turned, cache))
    close(results[0][0], results[1][0])
    return results[0][1], results[1][1]


class Latents:
    """The cache of some sequences in shuffled blocks, and queries for their last rows."""

    def __init__(
        self,
        contexts: list[int],
        new_rows: list[int],
        *,
        heads: int = 3,
        nope: int = 10,
        rope: int = 8,
        kv_lora: int = 24,
        v: int = 12,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        first_keys: list[int] | None = None,
    ) -> None:
        counts = [-(-context // BLOCK_TOKENS) for context in contexts]
        ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(9)).tolist()
        cache = draw(len(ids), BLOCK_TOKENS, kv_lora + rope, dtype=dtype, seed=1)
        self.cache = cache.to(cache_dtype or dtype)
        tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            tables[s, :count] = torch.tensor([ids.pop() for _ in range(count)])
        self.tables = tables.to(DEVICE)
        self.contexts = contexts
        self.new_rows = new_rows
        self.starts = [0, *itertools.accumulate(new_rows)]
        self.q = draw(sum(new_rows), heads, nope + rope, dtype=dtype, seed=3)
        self.kv_b = draw(heads, nope + v, kv_lora, dtype=dtype, seed=4) * kv_lora**-0.5
        self.first_keys = first_keys or [0] * len(contexts)
        self.scale = (nope + rope) ** -0.5

    def rows(self, seq: int, end: int, count: int) -> slice:
        """The rows of `seq` before position `end`."""
        last = self.starts[seq + 1] - (self.contexts[seq] - end)
        return slice(last - count, last)

    def absorbed(
        self, seqs: list[int], ends: list[int], counts: list[int], *, reference: bool = False
    ) -> torch.Tensor:
        """Attention of `counts[i]` rows of sequence `seqs[i]`, the last one at position `ends[i] - 1`."""
        todo = list(zip(seqs, ends, counts, strict=True))
        q = torch.cat([self.q[self.rows(*each)] for each in todo])
        row_seqs = [i for i, (_, _, count) in enumerate(todo) for _ in range(count)]
        positions = [p for _, end, count in todo for p in range(end - count, end)]
        run = absorbed.mla_attention_ref if reference else absorbed.mla_attention
        heads, _, kv_lora = self.kv_b.shape
        at = np.array(positions, dtype=np.int32)
        return run(
            q,
            self.kv_b,
            self.cache,
            self.tables[seqs],
            integers(row_seqs),
            integers(positions),
            integers([self.first_keys[s] for s in seqs]),
            scale=self.scale,
            plan=absorbed.attention_plan(at, heads=heads, kv_lora=kv_lora, device=DEVICE),
        )

    def expanded(
        self, seqs: list[int], ends: list[int], counts: list[int], *, reference: bool = False
    ) -> torch.Tensor:
        """The same by the other path."""
        q = torch.cat([self.q[self.rows(*each)] for each in zip(seqs, ends, counts, strict=True)])
        plan = prefill.prefill_plan([0, *itertools.accumulate(counts)], ends, DEVICE)
        run = prefill.mla_prefill_ref if reference else prefill.mla_prefill
        return run(
            q,
            self.kv_b,
            self.cache,
            self.tables[seqs],
            integers([self.first_keys[s] for s in seqs]),
            plan,
            scale=self.scale,
        )

    @property
    def all(self) -> tuple[list[int], list[int], list[int]]:
        return list(range(len(self.contexts))), self.contexts, self.new_rows


@dtypes
@pytest.mark.parametrize("half_tile", [256, 32], ids=["whole", "halves"])
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "kv_lora", "v"),
    [(3, 10, 8, 24, 12), (1, 0, 24, 33, 7), (17, 16, 16, 64, 16)],
)
def test_mla_attention(
    heads: int,
    nope: int,
    rope: int,
    kv_lora: int,
    v: int,
    half_tile: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = absorbed.Tiles(heads=16, heads_per_warp=8)  # 17 heads are two tiles
    monkeypatch.setattr(absorbed, "launch_tiles", lambda: small)
    monkeypatch.setattr(absorbed, "HALF_TILE", half_tile)
    latents = Latents(
        [1, 33, 70], [1, 1, 2], heads=heads, nope=nope, rope=rope, kv_lora=kv_lora, v=v,
        dtype=dtype,
    )  # fmt: skip
    close(latents.absorbed(*latents.all), latents.absorbed(*latents.all, reference=True))


@dtypes
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "kv_lora", "v"),
    [(3, 10, 8, 24, 12), (1, 0, 24, 33, 7), (2, 16, 16, 16, 16)],
)
def test_mla_prefill(
    heads: int, nope: int, rope: int, kv_lora: int, v: int, dtype: torch.dtype
) -> None:
    latents = Latents(
        [1, 100, 130, 64], [1, 70, 3, 64], heads=heads, nope=nope, rope=rope, kv_lora=kv_lora, v=v,
        dtype=dtype,
    )  # fmt: skip
    close(latents.expanded(*latents.all), latents.expanded(*latents.all, reference=True))


@NEEDS_E4M3
def test_attention_over_an_e4m3_cache() -> None:
    latents = Latents([70, 9], [3, 2], dtype=torch.float16, cache_dtype=E4M3)
    want = latents.absorbed(*latents.all, reference=True)
    close(latents.absorbed(*latents.all), want)
    close(latents.expanded(*latents.all), want)


def test_keys_before_the_first_are_not_seen_even_where_that_leaves_none() -> None:
    latents = Latents([70, 2, 66], [4, 2, 1], first_keys=[66, 1, 65])
    want = latents.expanded(*latents.all, reference=True)
    want[4] = 0.0  # position 0 sees nothing where the first key is 1
    assert want.isfinite().all()
    close(latents.absorbed(*latents.all), want)
    close(latents.expanded(*latents.all), want)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("half_tile", [256, 16], ids=["whole", "halves"])
def test_a_row_of_absorbed_attention_does_not_depend_on_the_others(
    half_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "HALF_TILE", half_tile)
    latents = Latents([150, 20, 70], [4, 1, 2])
    together = latents.absorbed(*latents.all)
    assert torch.equal(latents.absorbed([1], [20], [1]), together[4:5])  # fewer spans, too
    assert torch.equal(latents.absorbed([2], [70], [2]), together[5:])
    parts = [latents.absorbed([0], [end], [count]) for end, count in ((147, 1), (150, 3))]
    assert torch.equal(torch.cat(parts), together[:4])
    for part_bytes in (1, 4 * 4 * 3 * (24 + 1)):  # one row after the other, or some
        monkeypatch.setattr(span_plan, "PART_BYTES", part_bytes)
        assert torch.equal(latents.absorbed(*latents.all), together)


def test_a_row_of_prefill_does_not_depend_on_batch_chunks_or_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents = Latents([170, 50], [170, 50])
    together = latents.expanded(*latents.all)
    assert torch.equal(latents.expanded([1], [50], [50]), together[170:])
    chunks = [
        latents.expanded([0], [end], [count]) for end, count in ((57, 57), (66, 9), (170, 104))
    ]
    assert torch.equal(torch.cat(chunks), together[:170])
    monkeypatch.setattr(prefill, "LAUNCH_TOKENS", 1)  # one sequence's span after the other
    assert torch.equal(latents.expanded(*latents.all), together)


def test_prefill_plans_launch_each_span_once_and_only_rows_that_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "LAUNCH_TOKENS", 80)
    monkeypatch.setattr(prefill, "ROWS_TILE", 64)
    # 150 rows of a whole prompt; 2 rows after 140 cached ones; a single row
    plan = prefill.prefill_plan([0, 150, 152, 153], [150, 142, 1], torch.device("cpu"))
    seen = [
        (
            launch.span,
            launch.tokens,
            plan.table[launch.pieces].tolist(),
            plan.table[launch.ends].tolist(),
            list(zip(*(plan.table[x].tolist() for x in (launch.tile_pieces, launch.tile_rows)), strict=True)),
        )
        for launch in plan.launches
    ]  # fmt: skip
    assert seen == [
        (0, 64, [0], [64], [(0, 0), (0, 64), (0, 128)]),
        (0, 65, [1, 2], [64, 65], [(0, 150), (1, 152)]),
        (1, 64, [0], [64], [(0, 64), (0, 128)]),
        (1, 64, [1], [64], [(0, 150)]),
        (2, 36, [0, 1], [22, 36], [(0, 128), (1, 150)]),
    ]


def test_no_rows_are_no_work() -> None:
    latents = Latents([5], [0])
    assert latents.absorbed([0], [5], [0]).shape == (0, 3, 12)
    assert latents.expanded([0], [5], [0]).shape == (0, 3, 12)
    nothing = torch.empty(0, 3, 18, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    cache, norm = torch.zeros(1, 4, 32, device=DEVICE), torch.ones(24, device=DEVICE)
    got = mla_store(
        nothing,
        torch.empty(0, 32, device=DEVICE),
        norm,
        1e-6,
        draw(4, 8),
        slots.int(),
        slots,
        cache,
        rope_interleave=True,
    )
    assert got.shape == (0, 3, 18) and not cache.any()

"""Each Triton kernel against its torch reference: in the interpreter without a GPU, natively with one.

Tolerances: float32 sums of a few hundred terms in another order differ by some 1e-6 relative; float16 results differ by
one rounding of the stored value.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.attention import span_plan
from headrace_kernels.attention.paged_attention import (
    SPAN,
    TILES,
    attention_plan,
    paged_attention,
    paged_attention_ref,
)
from headrace_kernels.attention.rope import rope_and_store_kv, rope_and_store_kv_ref
from headrace_kernels.dense.linear import linear, linear_ref, tile_of
from headrace_kernels.dense.rms_norm import rms_norm, rms_norm_ref
from headrace_kernels.dense.silu_mul import TILE as SILU_TILE
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_ref

pytestmark = pytest.mark.matrix
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
ROWS_TILE = tile_of(2).rows
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize("hidden", [1, 64, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(hidden: int, with_residual: bool, dtype: torch.dtype) -> None:
    x, weight = draw(5, hidden, dtype=dtype), draw(hidden, dtype=dtype, seed=1)
    mine = draw(5, hidden, dtype=dtype, seed=2) if with_residual else None
    theirs = None if mine is None else mine.clone()
    close(rms_norm(x, weight, 1e-5, mine), rms_norm_ref(x, weight, 1e-5, theirs))
    if mine is not None and theirs is not None:
        close(mine, theirs)


@dtypes
@pytest.mark.parametrize("width", [1, SILU_TILE - 1, SILU_TILE, SILU_TILE + 3])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = draw(3, 2 * width, dtype=dtype) * 4
    close(silu_mul(gate_up), silu_mul_ref(gate_up))


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (2, 1, 24)])
def test_rope_and_store_kv(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    rows, blocks, block_tokens = 6, 5, 4
    # Slices of one buffer, as in the model.
    qkv = draw(rows, (heads + 2 * kv_heads), dim, dtype=dtype)
    cos_sin = draw(50, dim, dtype=torch.float32, seed=1)
    positions = torch.tensor([0, 49, 3, 4, 4, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([19, 0, 7, 8, 3, 12], device=DEVICE)
    results = []
    for function in (rope_and_store_kv, rope_and_store_kv_ref):
        q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
        caches = [draw(blocks, block_tokens, kv_heads, dim, dtype=dtype, seed=s) for s in (3, 4)]
        function(q, k, v, cos_sin, positions, slots, *caches)
        results.append((q, *caches))
    for got, want in zip(*results, strict=True):
        close(got, want)


@dtypes
@pytest.mark.parametrize("rows", [1, ROWS_TILE - 1, ROWS_TILE + 1])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 64), (72, 67), (40, 7)])
def test_linear(rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, n_in, dtype=dtype), draw(n_out, n_in, dtype=dtype, seed=1)
    got, want = linear(x, weight), linear_ref(x, weight)
    scale = n_in**0.5  # of the results
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


def test_a_row_of_linear_does_not_depend_on_the_other_rows() -> None:
    x, weight = draw(100, 200, dtype=torch.float32), draw(90, 200, dtype=torch.float32, seed=1)
    together = linear(x, weight)
    for row in (0, 63, 64, 99):
        assert torch.equal(linear(x[row : row + 1].contiguous(), weight)[0], together[row])


class Paged:
    """KV of some sequences in shuffled blocks, and queries for their last rows."""

    def __init__(
        self,
        contexts: list[int],
        new_rows: list[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        block_tokens = 16
        counts = [-(-context // block_tokens) for context in contexts]
        ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(9)).tolist()
        self.k = draw(len(ids), block_tokens, kv_heads, dim, dtype=dtype, seed=1)
        self.v = draw(len(ids), block_tokens, kv_heads, dim, dtype=dtype, seed=2)
        tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            tables[s, :count] = torch.tensor([ids.pop() for _ in range(count)])
        self.tables = tables.to(DEVICE)
        self.contexts = contexts
        self.new_rows = new_rows
        self.q = draw(sum(new_rows), heads, dim, dtype=dtype, seed=3)
        self.scale = dim**-0.5

    def starts(self, new_rows: list[int]) -> list[int]:
        return [0, *itertools.accumulate(new_rows)]

    def run(self, seqs: list[int], ends: list[int], rows: list[int]) -> torch.Tensor:
        """Attention of `rows[i]` rows of sequence `seqs[i]`, the last one at position `ends[i] - 1`."""
        all_starts = self.starts(self.new_rows)
        picked = []
        for s, end, count in zip(seqs, ends, rows, strict=True):
            last = all_starts[s + 1] - (self.contexts[s] - end)
            picked.append(self.q[last - count : last])
        starts = self.starts(rows)
        return paged_attention(
            torch.cat(picked).contiguous(),
            self.k,
            self.v,
            self.tables[seqs],
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            scale=self.scale,
            plan=attention_plan(
                starts,
                ends,
                heads=self.q.shape[1],
                dim=self.q.shape[2],
                device=torch.device(DEVICE),
            ),
        )

    def reference(self) -> torch.Tensor:
        return paged_attention_ref(
            self.q,
            self.k,
            self.v,
            self.tables,
            torch.tensor(self.starts(self.new_rows), device=DEVICE),
            torch.tensor(self.contexts, device=DEVICE),
            scale=self.scale,
        )


@pytest.mark.matrix(cases=2)
@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (2, 1, 24), (32, 2, 16)]
)
def test_paged_attention(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    contexts, rows = [1, TILES[2].tokens, TILES[2].tokens + 1, 50, 40], [1, 1, 20, 50, 3]
    paged = Paged(contexts, rows, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    close(paged.run([0, 1, 2, 3, 4], contexts, rows), paged.reference())


def test_paged_attention_across_spans() -> None:
    contexts, rows = [SPAN + 5, SPAN - 1, 2 * SPAN], [10, 2, 1]
    paged = Paged(contexts, rows, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    close(paged.run([0, 1, 2], contexts, rows), paged.reference())


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("heads", [3, 16])  # 16 rows of 16 heads are two programs
def test_a_row_of_attention_does_not_depend_on_batch_or_chunks(heads: int) -> None:
    contexts, rows = [SPAN + 30, 50], [60, 50]
    paged = Paged(contexts, rows, heads=heads, kv_heads=1, dim=16, dtype=torch.float32)
    whole = paged.run([0, 1], contexts, rows)
    alone = paged.run([1], [50], [50])
    assert torch.equal(alone, whole[60:])
    chunks = [
        paged.run([0], [end], [count])
        for end, count in ((SPAN - 7, 23), (SPAN + 29, 36), (SPAN + 30, 1))
    ]
    assert torch.equal(torch.cat(chunks), whole[:60])


@pytest.mark.thorough
def test_spans_that_take_turns_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, rows = [2 * SPAN + 30, 50, SPAN + 1, 7], [40, 50, 1, 7]
    paged = Paged(contexts, rows, heads=3, kv_heads=1, dim=16, dtype=torch.float32)
    whole = paged.run([0, 1, 2, 3], contexts, rows)
    for rows_at_once in (1, 60):
        monkeypatch.setattr(span_plan, "PART_BYTES", rows_at_once * 4 * 3 * (16 + 1))
        assert torch.equal(paged.run([0, 1, 2, 3], contexts, rows), whole)


def test_no_rows_are_no_work() -> None:
    cache = draw(3, 16, 2, 16, dtype=torch.float32)
    none = paged_attention(
        draw(0, 4, 16, dtype=torch.float32), cache, cache,
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
        torch.ones(1, dtype=torch.int32, device=DEVICE),
        scale=1.0, plan=attention_plan([0, 0], [1], heads=4, dim=16, device=torch.device(DEVICE)),
    )  # fmt: skip
    assert none.shape == (0, 4, 16)
    empty = draw(0, 8, dtype=torch.float32)
    assert rms_norm(empty, draw(8, dtype=torch.float32), 1e-5).shape == (0, 8)
    assert silu_mul(empty).shape == (0, 4)
    assert linear(empty, draw(3, 8, dtype=torch.float32)).shape == (0, 3)

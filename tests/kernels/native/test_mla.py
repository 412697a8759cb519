"""Latent attention of the native backend: against its formula in float64, and bit by bit against itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from headrace_kernels.batch import Batch
from headrace_kernels.ops import Compiled, MlaAttention, MlaStep, Value
from helpers.kernels.paged_rows import BLOCK, PagedRows, Part, cache_floats
from helpers.kernels.tensor_backend import TensorBackend, floats_of

EPS = 1e-6


def attention(
    heads: int, rank: int, nope: int, rope: int, v: int, *, interleave: bool = True, layers: int = 1
) -> MlaAttention:
    return MlaAttention(
        layers=layers,
        heads=heads,
        kv_lora_rank=rank,
        nope_dim=nope,
        rope_dim=rope,
        v_dim=v,
        block_tokens=BLOCK,
        context_tokens=4096,
        scale=(nope + rope) ** -0.5,
        inv_freq=[10_000 ** (-2 * i / rope) for i in range(rope // 2)],
        rope_scale=1.25,
        rope_interleave=interleave,
        hidden_size=0,
        mtp=False,
    )


# The smallest; odd everything; SmolLM2 re-expressed; with W_UK; more heads than a tile.
SHAPES = {
    "one": attention(1, 1, 0, 2, 1),
    "odd": attention(9, 37, 5, 6, 3),
    "smollm2": attention(9, 256, 0, 192, 64),
    "halves": attention(2, 48, 16, 8, 24, interleave=False),
    "many": attention(27, 16, 0, 10, 17),
}


@dataclass
class Weights:
    """Of one layer; a row of `table` is [query | latent]."""

    table: torch.Tensor
    norm: torch.Tensor
    kv_b: torch.Tensor


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(a: MlaAttention, rows: int) -> Weights:
    width = a.heads * (a.nope_dim + a.rope_dim) + a.kv_lora_rank + a.rope_dim
    kv_b = noise(a.heads, a.nope_dim + a.v_dim, a.kv_lora_rank, seed=2) / a.kv_lora_rank**0.5
    return Weights(2 * noise(rows, width), noise(a.kv_lora_rank, seed=1), kv_b)


class Layer:
    """One layer of latent attention over embeddings."""

    def __init__(
        self, a: MlaAttention, w: Weights, dtype: str = "float32", simd: str | None = None
    ) -> None:
        self.backend = TensorBackend(a, dtype=dtype, simd=simd)
        table, norm = self.backend.table(w.table), self.backend.vector(w.norm)
        kv_b = self.backend.head_matrices(w.kv_b)
        split = a.heads * (a.nope_dim + a.rope_dim)

        def describe(step: MlaStep) -> Value:
            x = step.embed(table)
            latent = step.columns(x, split, w.table.shape[1])
            q = step.mla_store(step.columns(x, 0, split), latent, norm, EPS, a.layers - 1)
            return step.wanted_rows(step.mla_attention(q, kv_b, a.layers - 1))

        self.run: Compiled = self.backend.compile(describe)

    def __call__(self, rows: PagedRows, steps: list[list[Part]]) -> torch.Tensor:
        """The rows of these steps, in the order of the steps, over a fresh cache full of what is no number."""
        self.backend.allocate_kv(rows.num_blocks)
        cache_floats(self.backend)[:] = np.nan
        return torch.cat([floats_of(self.run(rows.batch(parts))) for parts in steps])


def turned(x: torch.Tensor, a: MlaAttention) -> torch.Tensor:
    """`x` is [positions, heads, rope_dim]."""
    angles = torch.outer(torch.arange(len(x)).double(), torch.tensor(a.inv_freq).double())
    cos, sin = (f(angles)[:, None] * a.rope_scale for f in (torch.cos, torch.sin))
    x1, x2 = (x[..., ::2], x[..., 1::2]) if a.rope_interleave else x.chunk(2, dim=-1)
    turned = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    return torch.stack(turned, -1).flatten(-2) if a.rope_interleave else torch.cat(turned, -1)


def expected(a: MlaAttention, w: Weights, x: torch.Tensor) -> torch.Tensor:
    """Not absorbed: keys and values of each head are made from the latents."""
    x, n, nope = x.double(), len(x), a.nope_dim
    q, latent, key = x.split(
        [a.heads * (nope + a.rope_dim), a.kv_lora_rank, a.rope_dim],
        dim=1,
    )
    latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], w.norm.double(), EPS)
    made = torch.einsum("tr,hdr->htd", latent, w.kv_b.double())
    q = q.view(n, a.heads, -1)
    scores = torch.einsum("thd,sd->hts", turned(q[..., nope:], a), turned(key[:, None], a)[:, 0])
    scores += torch.einsum("thd,hsd->hts", q[..., :nope], made[..., :nope])
    scores = (scores * a.scale).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,hsd->thd", scores.softmax(-1), made[..., nope:]).reshape(n, -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula(shape: str) -> None:
    a = SHAPES[shape]
    rows = PagedRows([1, 5, 16, 63, 65, 150])
    w = weights(a, rows.rows)
    got = Layer(a, w)(rows, [rows.whole()])
    for (_, _, n), first, x in zip(
        rows.whole(), rows.first, w.table.split(rows.lengths), strict=False
    ):
        # Scores reach 30, where a float32 is 2e-6 apart, and exp makes that relative.
        want = expected(a, w, x)
        torch.testing.assert_close(got[first : first + n].double(), want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_same_bits_alone_in_company_in_chunks_and_decoded(shape: str) -> None:
    a = SHAPES[shape]
    rows = PagedRows([1, 2, 3, 7, 15, 16, 17, 20, 31, 40, 64, 65, 70, 5, 1, 9, 33])
    assert len(rows.lengths) == 17
    w = weights(a, rows.rows)
    layer = Layer(a, w)
    together = layer(rows, [rows.whole()])
    for part in rows.whole():
        seq, _, n = part
        mine = together[rows.first[seq] : rows.first[seq] + n]
        assert torch.equal(layer(rows, [[part]]), mine)
    longest = rows.lengths.index(70)
    mine = together[rows.first[longest] : rows.first[longest] + 70]
    for cuts in ([0, 1, 18, 64, 70], [0, 33, 70], list(range(71))):
        steps = [[(longest, start, stop)] for start, stop in pairwise(cuts)]
        assert torch.equal(layer(rows, steps), mine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("shape", ["odd", "smollm2"])
def test_instruction_sets_have_the_same_bits(shape: str, dtype: str) -> None:
    a = SHAPES[shape]
    rows = PagedRows([1, 40, 3])
    w = weights(a, rows.rows)
    want = Layer(a, w, dtype)(rows, [rows.whole()])
    for simd in ("avx2", "portable"):
        try:
            layer = Layer(a, w, dtype, simd)
        except ValueError:
            continue  # not on this machine
        assert torch.equal(layer(rows, [rows.whole()]), want), simd


def test_matrices_in_8_bits_are_those_of_the_rounded_ones() -> None:
    a = SHAPES["odd"]
    rows = PagedRows([20])
    w = weights(a, rows.rows)
    # Whole multiples of a power of two, whose greatest is 127 in each group: int8 holds them exactly.
    w.kv_b = (w.kv_b / w.kv_b.abs().max() * 126).round()
    w.kv_b[..., 0] = w.kv_b[:, 0, :] = w.kv_b[:, a.nope_dim, :] = 127
    w.kv_b /= 1024
    exact = Layer(a, w)(rows, [rows.whole()])
    got = Layer(a, w, "int8")(rows, [rows.whole()])
    # Rows keep 15 bits of the greatest element of a group: latents are some units, and two matrices add up.
    torch.testing.assert_close(got, exact, rtol=0, atol=2e-4)


def test_more_rows_than_are_worked_on_at_once() -> None:
    a = attention(40, 512, 1, 2, 2)  # 25 rows of latents fill the share of the cache
    rows = PagedRows([60, 7, 3])
    w = weights(a, rows.rows)
    layer = Layer(a, w)
    together = layer(rows, [rows.whole()])
    assert torch.equal(layer(rows, [[part] for part in rows.whole()]), together)
    want = expected(a, w, w.table[:60])
    torch.testing.assert_close(together[:60].double(), want, rtol=0, atol=3e-5)


def test_layers_do_not_touch_each_other() -> None:
    a = replace(SHAPES["halves"], layers=3)
    rows = PagedRows([20])
    w = weights(a, rows.rows)
    layer = Layer(a, w)  # writes the last one
    layer(rows, [rows.whole()])
    by_layer = cache_floats(layer.backend).reshape(rows.num_blocks, 3, -1)
    assert np.isnan(by_layer[:, :2]).all() and not np.isnan(by_layer[:, 2]).all()


def test_the_latent_is_kept_once_where_scores_do_not_read_it() -> None:
    once = TensorBackend(SHAPES["smollm2"], dtype="int8")
    assert once.kv_block_bytes == 4 * BLOCK * (256 + 192)
    assert once.kv_layout == (
        "native-mla-1 float32 layers=1 latent=256 rope=192 interleaved keys=rope"
        " block_tokens=16 layers_per_group=8"
    )
    twice = TensorBackend(SHAPES["halves"], dtype="int8")
    assert twice.kv_block_bytes == 4 * BLOCK * (48 + 48 + 8)
    assert "rope=8 halves keys=latent+rope" in twice.kv_layout


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_tokens": 24}, "block_tokens is 24, must be a multiple of 16 on a CPU"),
        ({"rope_dim": 6}, "rope_dim is 6, must be twice as many as inv_freq"),
        ({"kv_lora_rank": 0}, "width of a value is 0, must be at least 1"),
        ({"v_dim": 0}, "v_dim is 0, must be at least 1"),
        ({"heads": 0}, "heads is 0, must be a multiple of kv_heads"),
        ({"layers": 0}, "layers is 0, must be at least 1"),
        ({"rope_dim": 0, "inv_freq": []}, "inv_freq is 0, must be not empty"),
    ],
)
def test_shapes_that_do_not_fit_the_kernels_are_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TensorBackend(replace(SHAPES["halves"], **change), dtype="float32")  # type: ignore[arg-type]


def test_operands_that_do_not_fit_are_named() -> None:
    a = SHAPES["halves"]  # 2 heads of 16 + 8, rank 48, v 24
    backend = TensorBackend(a, dtype="float32")
    kv_b = backend.head_matrices(noise(2, 40, 48))
    norm = backend.vector(noise(48))
    table = backend.table(noise(4, 200))

    def case(describe: object, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            backend.compile(describe)  # type: ignore[arg-type]

    def part(step: MlaStep, width: int) -> Value:
        return step.columns(step.embed(table), 0, width)

    case(lambda s: s.mla_store(part(s, 47), part(s, 56), norm, EPS, 0), "mla_store: q is 47 wide")
    case(lambda s: s.mla_store(part(s, 48), part(s, 55), norm, EPS, 0), "latent is 55 wide")
    case(lambda s: s.mla_store(part(s, 48), part(s, 56), norm[1:], EPS, 0), "norm is 47 wide")
    case(lambda s: s.mla_store(part(s, 48), part(s, 56), norm, EPS, 1), "layer 1 of a cache of 1")
    case(lambda s: s.mla_attention(part(s, 49), kv_b, 0), "mla_attention: q is 49 wide")
    case(lambda s: s.mla_attention(s.wanted_rows(part(s, 48)), kv_b, 0), "not of the same rows")
    case(lambda s: s.paged_attention(part(s, 96), 0), "paged_attention: .*share a latent")
    case(lambda s: part(s, 201), r"columns: 0\.\.201 of 200")
    case(lambda s: s.columns(s.embed(table), 5, 5), r"columns: 5\.\.5 of 200")
    case(lambda s: s.concat(part(s, 3), s.wanted_rows(part(s, 3))), "concat: .*not of the same")
    case(lambda s: s.keep_hidden(s.embed(table)), "keep_hidden: .*without a drafting layer")
    case(lambda s: part(s, 3), "finish: the last operation")
    with pytest.raises(ValueError, match=r"kv_b is \(2, 40, 47\), expected \(2, 40, 48\)"):
        backend.head_matrices(noise(2, 40, 47))
    other = TensorBackend(attention(2, 48, 8, 8, 24), dtype="float32")
    wrong = other.head_matrices(noise(2, 32, 48))
    case(lambda s: s.mla_attention(part(s, 48), wrong, 0), "kv_b is of heads of another shape")


def test_columns_and_concat_copy() -> None:
    a = SHAPES["one"]
    backend = TensorBackend(a, dtype="float32")
    backend.allocate_kv(1)
    x = noise(5, 7)
    table = backend.table(x)

    def describe(step: MlaStep) -> Value:
        e = step.embed(table)
        both = step.concat(step.columns(e, 4, 7), step.columns(e, 0, 2))
        return step.wanted_rows(step.concat(both, both))

    batch: Batch = PagedRows([5]).batch([(0, 0, 5)])
    want = torch.cat([x[:, 4:], x[:, :2]] * 2, dim=1)
    assert torch.equal(backend.compile(describe)(batch), want)

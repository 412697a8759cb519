"""Absorbed multi-head latent attention of rows over the compressed paged cache: decode, and drafts beside it.

q             [rows, heads, nope_dim + rope_dim]  turned already; the row's own key is in the cache
kv_b          [heads, nope_dim + v_dim, kv_lora]  makes keys, then values, of a latent
cache         [blocks, block_tokens, kv_lora + rope_dim]  float or e4m3 with the scale 1
block_tables  [seqs, max_blocks]  int32
row_seqs      [rows]  int32  which sequence each row is of
positions     [rows]  int32  a row sees the keys first_keys[seq] .. position
first_keys    [seqs]  int32
out           [rows, heads, v_dim]
Cost: 2 * heads * (2 * kv_lora + rope_dim) flops for a row and key, with two halves (below) 2 * heads * (3 * kv_lora +
2 * rope_dim); reads each sequence's cache. With the 128 heads of DeepSeek-R1 the tensor cores are the bound, with few
heads memory bandwidth is.
Source: DeepSeek-V2 2024, section 2.1.3 (absorption). Run on an H100 and an H200; compiled for 10.0 too.

The key projection goes into the query and the value projection behind the sum, so that all heads attend over one key
of kv_lora + rope_dim values, of which the first kv_lora are also the value. Any subset of a step's rows may be given.
An e4m3 cache is widened to the queries' type before it is multiplied.

A latent of more than HALF_TILE values has two halves. A program makes all scores, but sums one half, so that its sums
fit into registers. It adds its own half of a score first: the weights of the two halves may differ by the last bit.

Batch invariance: a program owns one row. Keys are cut at fixed absolute positions into spans of SPAN tokens, each is
summed in tiles of KV_TILE tokens, and the spans are merged in order (merge_spans.py).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import driver

from headrace_kernels.attention.head_linear import head_linear
from headrace_kernels.attention.merge_spans import merge_spans
from headrace_kernels.attention.span_plan import SpanPlan, row_width, span_plan
from headrace_kernels.attention.unseen import finite_or_nan, finite_or_nan_ref, finite_values_ref
from headrace_kernels.interpret import INTERPRET, widen

HALF_TILE = 256  # values of a latent that a program sums, at most
KV_TILE = 32  # tokens; this, STAGES and HOPPER are tuned on an H200
SPAN = 1024  # tokens of one program, so that a long context fills the device; a guess
STAGES = 2


class Tiles(NamedTuple):
    """How programs share the heads. Registers and spills of each are in bench/results/kernel_resources.json."""

    heads: int  # at most; these share the keys that a program reads
    heads_per_warp: int


#: Four warps multiply 64 rows at once. So 128 heads and half a latent are one such product for each four warps, and the
#: scores stay in the registers that the values are then multiplied from.
HOPPER = Tiles(heads=128, heads_per_warp=16)
#: On Blackwell sums lie in tensor memory and go through registers when they fade: more than these spill. A guess.
OTHERS = Tiles(heads=64, heads_per_warp=8)


def attention_plan(
    positions: NDArray[np.int32],
    *,
    heads: int,
    kv_lora: int,
    device: torch.device,
    padded: bool = False,
) -> SpanPlan:
    """For rows at these positions, in the order of the queries, for all layers; `padded` for `span_plan`."""
    ones = np.ones(len(positions), dtype=np.int64)
    width = row_width(heads, kv_lora)
    return span_plan(ones, positions + 1, span=SPAN, width=width, device=device, padded=padded)


@triton.jit(do_not_specialize=["max_blocks", "first_work", "works"])
def _attend_latent_kernel(
    latent_ptr, q_ptr, cache_ptr, tables_ptr, seqs_ptr, positions_ptr, first_keys_ptr, works_ptr, part_ptr,
    lse_ptr, scale, max_blocks, first_work, works, q_row,
    HEADS: tl.constexpr, NOPE: tl.constexpr, KV_LORA: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, HEADS_TILE: tl.constexpr, HALVES: tl.constexpr, HALF_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr, KV_TILE: tl.constexpr, SPAN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    work = first_work + tl.program_id(0)
    half = tl.program_id(1) % HALVES  # of the latent, that this program sums
    row = tl.load(works_ptr + work).to(tl.int64)
    span = tl.load(works_ptr + works + work)
    part = tl.load(works_ptr + 2 * works + work).to(tl.int64)
    head = tl.program_id(1) // HALVES * HEADS_TILE + tl.arange(0, HEADS_TILE)
    mine = half * HALF_TILE + tl.arange(0, HALF_TILE)
    other = (HALVES - 1 - half) * HALF_TILE + tl.arange(0, HALF_TILE)
    d = tl.arange(0, ROPE_TILE)
    wide = tl.float32 if INTERPRET else q_ptr.dtype.element_ty  # of operands
    width: tl.constexpr = KV_LORA + ROPE
    seq = tl.load(seqs_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    first_key = tl.load(first_keys_ptr + seq)
    q_rope = tl.load(
        q_ptr + row * q_row + head[:, None] * (NOPE + ROPE) + NOPE + d[None, :],
        mask=(head[:, None] < HEADS) & (d[None, :] < ROPE), other=0.0,
    )  # fmt: skip
    q_rope = q_rope.to(wide)
    q_mine = q_rope  # not used where there is no NOPE
    q_other = q_rope
    if NOPE > 0:
        latent_at = latent_ptr + (row * HEADS + head[:, None]) * KV_LORA
        q_mine = tl.load(
            latent_at + mine[None, :], mask=(head[:, None] < HEADS) & (mine[None, :] < KV_LORA), other=0.0
        ).to(wide)  # fmt: skip
        if HALVES == 2:
            q_other = tl.load(
                latent_at + other[None, :], mask=(head[:, None] < HEADS) & (other[None, :] < KV_LORA), other=0.0
            ).to(wide)  # fmt: skip

    best = tl.full((HEADS_TILE,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((HEADS_TILE,), dtype=tl.float32)
    acc = tl.zeros((HEADS_TILE, HALF_TILE), dtype=tl.float32)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, position + 1), KV_TILE):
        token = start + tl.arange(0, KV_TILE)
        seen = (token <= position) & (token >= first_key)
        block = tl.load(
            tables_ptr + seq * max_blocks + token // BLOCK_TOKENS, mask=seen, other=0
        ).to(tl.int64)
        entry = cache_ptr + ((block * BLOCK_TOKENS + token % BLOCK_TOKENS) * width)[:, None]
        c = tl.load(
            entry + mine[None, :], mask=seen[:, None] & (mine[None, :] < KV_LORA), other=0.0
        )
        c = widen(c, wide, INTERPRET)
        key = tl.load(
            entry + KV_LORA + d[None, :], mask=seen[:, None] & (d[None, :] < ROPE), other=0.0
        )
        key = widen(key, wide, INTERPRET)
        scores = tl.dot(q_rope, tl.trans(key), input_precision="ieee")
        if NOPE > 0:
            scores = tl.dot(q_mine, tl.trans(c), scores, input_precision="ieee")
            if HALVES == 2:
                rest = tl.load(
                    entry + other[None, :], mask=seen[:, None] & (other[None, :] < KV_LORA), other=0.0
                )  # fmt: skip
                rest = widen(rest, wide, INTERPRET)
                scores = tl.dot(q_other, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], finite_or_nan(scores * scale), -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Where nothing is seen yet the best stays -inf; exp(-inf - 0) is then 0, not NaN.
        pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
        p = tl.exp(scores - pivot[:, None])
        fade = tl.exp(best - pivot)
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(c.dtype), c, input_precision="ieee")
        best = new_best

    any_seen = total > 0.0
    result = acc / tl.where(any_seen, total, 1.0)[:, None]
    lse = tl.where(any_seen, best + tl.log(tl.where(any_seen, total, 1.0)), -float("inf"))
    place = part * HEADS + head
    tl.store(
        part_ptr + place[:, None] * KV_LORA + mine[None, :], result,
        mask=(head[:, None] < HEADS) & (mine[None, :] < KV_LORA),
    )  # fmt: skip
    tl.store(lse_ptr + place, lse, mask=head < (1 - half) * HEADS)  # one of the halves


def launch_tiles() -> Tiles:
    """Those of the current device. All rows of a device are computed alike."""
    if INTERPRET.value:
        return OTHERS
    target: Any = driver.active.get_current_target()
    return HOPPER if target.arch // 10 == 9 else OTHERS


def mla_attention(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_seqs: torch.Tensor,
    positions: torch.Tensor,
    first_keys: torch.Tensor,
    *,
    scale: float,
    plan: SpanPlan,
) -> torch.Tensor:
    """Attention of every row over the keys that it sees; zeros where there are none.

    `plan` is of the same positions, known on the host: the launch needs no copy from the device.
    """
    rows, heads, q_dim = q.shape
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q_dim - rope_dim
    assert rope_dim > 0 and nope_dim >= 0 and kv_b.shape[0] == heads and kv_b.shape[1] > nope_dim
    assert q.is_contiguous() and cache.is_contiguous() and block_tables.is_contiguous()
    assert row_seqs.shape == positions.shape == (rows,)
    q_latent = head_linear(q[..., :nope_dim], kv_b[:, :nope_dim])  # [rows, heads, kv_lora]
    summed = torch.empty_like(q_latent)
    assert plan.rows.shape[1] == rows
    tiles = launch_tiles()
    heads_tile = min(tiles.heads, max(16, triton.next_power_of_2(heads)))
    latent_tile = max(16, triton.next_power_of_2(kv_lora))
    half_tile = min(latent_tile, HALF_TILE)
    halves = latent_tile // half_tile
    assert halves <= 2, f"a latent of {kv_lora} values is more than two halves of {half_tile}"
    options = {"num_warps": max(4, heads_tile // tiles.heads_per_warp), "num_stages": STAGES}
    for launch in plan.launches:
        part = torch.empty(launch.parts, heads, kv_lora, dtype=torch.float32, device=q.device)
        lse = torch.empty(launch.parts, heads, dtype=torch.float32, device=q.device)
        _attend_latent_kernel[(len(launch.works), triton.cdiv(heads, heads_tile) * halves)](
            q_latent, q, cache, block_tables, row_seqs, positions, first_keys, plan.works, part,
            lse, scale, block_tables.shape[1], launch.works.start, plan.works.shape[1], q.stride(0),
            HEADS=heads, NOPE=nope_dim, KV_LORA=kv_lora, ROPE=rope_dim, BLOCK_TOKENS=cache.shape[1],
            HEADS_TILE=heads_tile, HALVES=halves, HALF_TILE=half_tile,
            ROPE_TILE=max(16, triton.next_power_of_2(rope_dim)), KV_TILE=KV_TILE, SPAN=SPAN, INTERPRET=INTERPRET,
            **options,
        )  # fmt: skip
        of_rows = summed[launch.rows.start : launch.rows.stop]
        merge_spans(part, lse, plan.rows, of_rows, first_row=launch.rows.start)
        del part, lse  # before the next launch takes as much
    return head_linear(summed, kv_b[:, nope_dim:].transpose(1, 2))


def mla_attention_ref(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_seqs: torch.Tensor,
    positions: torch.Tensor,
    first_keys: torch.Tensor,
    *,
    scale: float,
    plan: SpanPlan,  # noqa: ARG001 - only the kernel needs it
) -> torch.Tensor:
    """The same in torch, one sequence after the other."""
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q.shape[2] - rope_dim
    w_k, w_v = kv_b.float().split((nope_dim, kv_b.shape[1] - nope_dim), dim=1)
    q_latent = torch.einsum("rhn,hnl->rhl", q[..., :nope_dim].float(), w_k)
    query = torch.cat((q_latent, q[..., nope_dim:].float()), dim=-1)
    out = q.new_empty(len(q), q.shape[1], w_v.shape[1])
    for seq in row_seqs.unique().tolist():
        rows = (row_seqs == seq).nonzero().squeeze(1)
        position = positions[rows].long()
        context = int(position.max()) + 1
        blocks = block_tables[seq, : -(-context // cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:context].float()
        keys[: first_keys[seq]] = 0  # there may be anything, such as somebody else's NaN
        scores = query[rows] @ keys.T * scale  # [rows, heads, context]
        token = torch.arange(context, device=q.device)
        hidden = (token > position[:, None]) | (token < first_keys[seq])
        latents, broken = finite_values_ref(keys[:, :kv_lora])
        scores = finite_or_nan_ref(scores).masked_fill(broken, torch.nan)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        summed = weights @ latents  # [rows, heads, kv_lora]
        out[rows] = torch.einsum("rhl,hvl->rhv", summed, w_v).to(out.dtype)
    return out


def mla_attention_bytes(
    context_sum: int,
    rows: int,
    heads: int,
    *,
    kv_lora: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
    element_bytes: int,
    cache_bytes: int,
) -> int:
    """Bytes that must move when each row's cache is read once: it, q, kv_b, out. `cache_bytes` is of one value."""
    cache = cache_bytes * context_sum * (kv_lora + rope_dim)
    ends = element_bytes * rows * heads * (nope_dim + rope_dim + v_dim)
    return cache + ends + element_bytes * heads * (nope_dim + v_dim) * kv_lora


def mla_attention_flops(
    context_sum: int,
    rows: int,
    heads: int,
    *,
    kv_lora: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
) -> int:
    """Multiplications and additions; `context_sum` is the number of keys that all rows see together."""
    attend = 2 * heads * context_sum * (2 * kv_lora + rope_dim)
    return attend + 2 * rows * heads * kv_lora * (nope_dim + v_dim)

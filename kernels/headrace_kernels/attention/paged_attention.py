"""Causal grouped-query attention of new rows over a paged KV cache; prefill, chunks and decode alike.

q             [rows, heads, dim]  rows of all sequences, one after the other; their K and V are in the cache already
k_cache, v_cache  [blocks, block_tokens, kv_heads, dim]
block_tables  [seqs, max_blocks]  int32
seq_starts    [seqs + 1]          int32; rows of sequence s are seq_starts[s] : seq_starts[s + 1]
context_lens  [seqs]              int32; KV tokens of the sequence, its own rows included
out           [rows, heads, dim]
Cost: reads each sequence's KV once a row tile: 2 * context * kv_heads * dim * element_bytes; 4 * context * heads * dim
flops a row. Decode is bound by memory bandwidth, prefill by the tensor cores.
Source: online softmax as in Milakov and Gimelshein 2018 and Dao 2023, paging as in Kwon et al. 2023.

Batch invariance: KV is cut at fixed absolute positions into spans of SPAN tokens, each span is summed in tiles of
KV_TILE tokens, and the spans of a row are merged in order. None of this depends on the other rows, on how a prompt was
chunked, or on what was cached: a row gives the same bits whichever way it came.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from headrace_kernels.attention.merge_spans import merge_spans
from headrace_kernels.attention.span_plan import SpanPlan, row_width, span_plan
from headrace_kernels.attention.unseen import (
    finite_or_nan,
    finite_or_nan_ref,
    finite_values,
    finite_values_ref,
)
from headrace_kernels.interpret import INTERPRET
from headrace_kernels.upload import upload

ROWS_TILE = 16  # query rows that a plan puts together
SPAN = (
    1024  # tokens of one program, so that a long context fills the device; a guess, not tuned yet
)
# Of float32: three products of TF32 on tensor cores, as in linear.py. The scores of float32 products without them did
# not fit into registers: 50 KB of stack a thread, and 1.1 ms for a row of 260 tokens.
PRECISION = "tf32x3"


@dataclass(frozen=True, slots=True)
class QueryTile:
    """What a program multiplies at once. bench/results/kernel_resources.json has the registers."""

    queries: int  # rows times heads of a group, at most: the M of `tl.dot`
    tokens: int


# By the bytes of an element; one plan for all rows. Tuned on an H200: more queries were as fast for a prompt, and took
# 1.8 times as long for an answer.
TILES = {2: QueryTile(64, 32), 4: QueryTile(16, 32)}
MOST_QUERIES = 128  # of a group that has more heads than a tile has queries


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of a step needs to know, made once."""

    tile_seq: torch.Tensor  # [tiles] int32
    tile_row: torch.Tensor  # [tiles] int32, its first row
    spans: SpanPlan


def attention_plan(
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int,
    dim: int,
    device: torch.device,
    padded: bool = False,
) -> AttentionPlan:
    """Rows of the sequences one after the other, as the step has them; `padded` for `span_plan`."""
    seqs: list[int] = []
    firsts: list[int] = []
    counts: list[int] = []
    contexts: list[int] = []
    for seq, context in enumerate(context_lens):
        start, end = seq_starts[seq], seq_starts[seq + 1]
        for first in range(start, end, ROWS_TILE):
            last = min(first + ROWS_TILE, end)
            seqs.append(seq)
            firsts.append(first)
            counts.append(last - first)
            contexts.append(context - (end - last))
    return AttentionPlan(
        upload(np.array(seqs, dtype=np.int32), device),
        upload(np.array(firsts, dtype=np.int32), device),
        span_plan(
            counts, contexts, span=SPAN, width=row_width(heads, dim), device=device, padded=padded
        ),
    )


@triton.jit(do_not_specialize=["first_work", "works", "max_blocks"])
def _attend_span_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, tile_seq_ptr, tile_row_ptr, works_ptr, part_ptr,
    lse_ptr, scale, first_work, works, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, GROUP_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr, ROWS: tl.constexpr, KV_TILE: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    work = first_work + tl.program_id(0)
    parts: tl.constexpr = ROWS_TILE // ROWS  # of the tile; a program has one
    kv_head = tl.program_id(1) // parts
    tile = tl.load(works_ptr + work)
    span = tl.load(works_ptr + works + work)
    first_part = tl.load(works_ptr + 2 * works + work)
    group: tl.constexpr = HEADS // KV_HEADS
    seq = tl.load(tile_seq_ptr + tile)
    row_of_tile = tl.load(tile_row_ptr + tile)
    first_row = row_of_tile + tl.program_id(1) % parts * ROWS
    last_row = tl.load(starts_ptr + seq + 1)
    context = tl.load(lens_ptr + seq)

    m = tl.arange(0, ROWS * GROUP_TILE)  # a query row and a head of the group
    row = first_row + m // GROUP_TILE
    member = m % GROUP_TILE
    valid = (row < last_row) & (member < group)
    head = kv_head * group + member
    position = context - (last_row - row)  # absolute position of the row
    d = tl.arange(0, DIM_TILE)
    row64 = row.to(tl.int64)
    q = tl.load(
        q_ptr + (row64[:, None] * HEADS + head[:, None]) * DIM + d[None, :],
        mask=valid[:, None] & (d[None, :] < DIM), other=0.0,
    )  # fmt: skip
    if INTERPRET:
        q = q.to(tl.float32)

    best = tl.full((ROWS * GROUP_TILE,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS * GROUP_TILE,), dtype=tl.float32)
    acc = tl.zeros((ROWS * GROUP_TILE, DIM_TILE), dtype=tl.float32)
    # One past the newest row's position; a part of a tile may have no rows, and then sees nothing.
    newest = context - last_row + tl.minimum(first_row + ROWS, last_row)
    newest = tl.where(first_row < last_row, newest, 0)
    end = tl.minimum((span + 1) * SPAN, newest)
    # Tiles that all rows see in whole, then those that they see in part.
    first_tokens = context - last_row + first_row + 1  # that the first row sees
    turn = tl.minimum(tl.maximum(first_tokens // KV_TILE * KV_TILE, span * SPAN), end)
    for partly in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        for start in range(turn if partly else span * SPAN, end if partly else turn, KV_TILE):
            token = start + tl.arange(0, KV_TILE)
            inside = token < newest
            block = tl.load(
                tables_ptr + seq.to(tl.int64) * max_blocks + token // BLOCK_TOKENS,
                mask=inside,
                other=0,
            ).to(tl.int64)
            slot = block * BLOCK_TOKENS + token % BLOCK_TOKENS
            at = ((slot * KV_HEADS + kv_head) * DIM)[:, None] + d[None, :]
            mask = inside[:, None] & (d[None, :] < DIM)
            k = tl.load(k_ptr + at, mask=mask, other=0.0)
            v = tl.load(v_ptr + at, mask=mask, other=0.0)
            if INTERPRET:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            broken = token < 0  # of none
            if partly:
                v, broken = finite_values(v)
            scores = finite_or_nan(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale)
            if partly:
                scores = tl.where(broken[None, :], float("nan"), scores)
            scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            # A row that sees nothing yet keeps -inf as its best; exp(-inf - 0) is then 0, not NaN.
            pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
            p = tl.exp(scores - pivot[:, None])
            fade = tl.exp(best - pivot)
            total = total * fade + tl.sum(p, axis=1)
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            best = new_best

    seen = total > 0.0
    result = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, best + tl.log(tl.where(seen, total, 1.0)), -float("inf"))
    place = (first_part + row64 - row_of_tile) * HEADS + head
    tl.store(
        part_ptr + place[:, None] * DIM + d[None, :],
        result,
        mask=valid[:, None] & (d[None, :] < DIM),
    )
    tl.store(lse_ptr + place, lse, mask=valid)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Attention of every row over its sequence up to its own position.

    `plan` is of the same `seq_starts` and `context_lens`, known on the host: the launch needs no copy from the device.
    """
    rows, heads, dim = q.shape
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    assert heads % kv_heads == 0 and k_cache.shape == v_cache.shape and k_cache.shape[3] == dim
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty_like(q)
    spans = plan.spans
    assert spans.rows.shape[1] == rows
    dim_tile = max(16, triton.next_power_of_2(dim))
    group_tile = triton.next_power_of_2(heads // kv_heads)
    tiles = TILES[q.element_size()]
    assert group_tile <= MOST_QUERIES, f"{heads // kv_heads} heads of a group are too many"
    rows_at_once = max(1, min(ROWS_TILE, tiles.queries // group_tile))
    options = {"num_warps": 8 if rows_at_once * group_tile >= 128 else 4}
    for launch in spans.launches:
        part = torch.empty(launch.parts, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(launch.parts, heads, dtype=torch.float32, device=q.device)
        _attend_span_kernel[(len(launch.works), kv_heads * (ROWS_TILE // rows_at_once))](
            q, k_cache, v_cache, block_tables, seq_starts, context_lens, plan.tile_seq, plan.tile_row, spans.works,
            part, lse, scale, launch.works.start, spans.works.shape[1], block_tables.shape[1],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_TILE=dim_tile, BLOCK_TOKENS=block_tokens,
            GROUP_TILE=group_tile, ROWS_TILE=ROWS_TILE, ROWS=rows_at_once, KV_TILE=tiles.tokens, SPAN=SPAN,
            PRECISION=PRECISION, INTERPRET=INTERPRET, **options,
        )  # fmt: skip
        of_rows = out[launch.rows.start : launch.rows.stop]
        merge_spans(part, lse, spans.rows, of_rows, first_row=launch.rows.start)
        del part, lse  # before the next launch takes as much
    return out


def paged_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The same in torch, one sequence after the other."""
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for s in range(context_lens.numel()):
        start, end = int(seq_starts[s]), int(seq_starts[s + 1])
        context = int(context_lens[s])
        blocks = block_tables[s, : -(-context // k_cache.shape[1])].long()
        k = k_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        v = v_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        v, broken = finite_values_ref(v)
        scores = finite_or_nan_ref(scores).masked_fill(broken.T[:, None], torch.nan)
        position = torch.arange(context - (end - start), context, device=q.device)
        hidden = torch.arange(context, device=q.device)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def paged_attention_bytes(
    rows: int, context_sum: int, heads: int, kv_heads: int, dim: int, element_bytes: int
) -> int:
    """Bytes that must move when each sequence's KV is read once: KV, q in, out out."""
    return element_bytes * dim * (2 * context_sum * kv_heads + 2 * rows * heads)

"""Multi-head latent attention of prompt rows, with keys and values made of the latents first: long prompts on a GPU.

q             [rows, heads, nope_dim + rope_dim]  turned already; the rows' own latents are in the cache
kv_b          [heads, nope_dim + v_dim, kv_lora]  makes keys, then values, of a latent
cache         [blocks, block_tokens, kv_lora + rope_dim]  float or e4m3 with the scale 1
block_tables  [seqs, max_blocks]  int32
first_keys    [seqs]  int32  a row sees the keys first_keys[seq] .. its position
plan          which rows are of which sequence, known on the host
out           [rows, heads, v_dim]
Cost: 2 * heads * (nope_dim + rope_dim + v_dim) flops for a row and key, absorbed attention 2 * heads * (2 * kv_lora +
rope_dim): 3.4 times as many at DeepSeek-R1's sizes. Expanding costs 2 * heads * kv_lora * (nope_dim + v_dim) a key and
step, which pays from some hundred rows on. Then the tensor cores are the bound.
Source: DeepSeek-V2 2024, section 2.1.2; merging parts by log-sum-exp as in Dao 2023. Run on an H100;
compiled for 10.0 too.

Batch invariance: keys are cut at fixed absolute positions into spans of SPAN tokens. Each is gathered, expanded by the
fixed plan of linear.py, summed in tiles of KV_TILE tokens and merged into what the spans before it gave. A row's
result is the same for whole and chunked prompts, cached or not. It is not that of absorbed attention, to the last bit:
a row that comes again must come by the same path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from headrace_kernels.attention.unseen import (
    finite_or_nan,
    finite_or_nan_ref,
    finite_values,
    finite_values_ref,
)
from headrace_kernels.dense.linear import linear
from headrace_kernels.interpret import INTERPRET, widen
from headrace_kernels.upload import upload

ROWS_TILE = 128  # query rows in one program; this, KV_TILE and LAUNCH are tuned on an H200
KV_TILE = 64  # tokens
SPAN = 1024  # tokens that are merged as one; a guess, not tuned yet
LAUNCH = {"num_warps": 8, "num_stages": 3}
LAUNCH_TOKENS = 4096  # tokens that are expanded at once: 256 MiB at DeepSeek-R1's sizes in bfloat16
GATHER_TILE = 32  # tokens; a guess, not tuned yet


@dataclass(frozen=True, slots=True)
class Launch:
    """One span of some sequences, and the rows that see it. The slices are of `PrefillPlan.table`."""

    span: int
    tokens: int  # of all pieces
    pieces: slice  # the sequence of each
    ends: slice  # where the tokens of each end in the workspace
    tile_pieces: slice  # the piece of each tile of rows
    tile_rows: slice  # its first row


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Rows of the sequences of `block_tables`, one sequence after the other."""

    seq_starts: list[int]  # [seqs + 1]; rows of sequence s are seq_starts[s] : seq_starts[s + 1]
    context_lens: list[int]  # [seqs]; the position of its last row, plus 1
    launches: list[Launch]
    table: torch.Tensor  # int32: seq_starts, context_lens, then what launches point to


def prefill_plan(
    seq_starts: Sequence[int], context_lens: Sequence[int], device: torch.device
) -> PrefillPlan:
    """What every layer of a step needs to know, made once."""
    table = [*seq_starts, *context_lens]

    def keep(values: list[int]) -> slice:
        table.extend(values)
        return slice(len(table) - len(values), len(table))

    launches: list[Launch] = []
    for span in range(-(-max(context_lens, default=0) // SPAN)):
        waiting = [s for s, context in enumerate(context_lens) if context > span * SPAN]
        while waiting:
            pieces: list[int] = []
            ends: list[int] = []
            tokens = 0
            while waiting:
                more = min(SPAN, context_lens[waiting[0]] - span * SPAN)
                if pieces and tokens + more > LAUNCH_TOKENS:
                    break
                tokens += more
                pieces.append(waiting.pop(0))
                ends.append(tokens)
            tiles = [
                (piece, row)
                for piece, seq in enumerate(pieces)
                for row in range(seq_starts[seq], seq_starts[seq + 1], ROWS_TILE)
                # the tile's last row, at its absolute position, is in or after the span
                if context_lens[seq] - seq_starts[seq + 1] + min(row + ROWS_TILE, seq_starts[seq + 1])
                > span * SPAN
            ]  # fmt: skip
            launches.append(
                Launch(
                    span,
                    tokens,
                    keep(pieces),
                    keep(ends),
                    keep([piece for piece, _ in tiles]),
                    keep([row for _, row in tiles]),
                )
            )
    tensor = upload(np.array(table, dtype=np.int32), device)
    return PrefillPlan(list(seq_starts), list(context_lens), launches, tensor)


@triton.jit(do_not_specialize=["lens_ptr", "pieces_ptr", "ends_ptr", "span", "max_blocks"])
def _gather_kernel(
    cache_ptr, tables_ptr, lens_ptr, pieces_ptr, ends_ptr, latent_ptr, key_ptr, span, max_blocks,
    KV_LORA: tl.constexpr, ROPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    seq = tl.load(pieces_ptr + piece).to(tl.int64)
    left = tl.load(lens_ptr + seq) - span * SPAN
    count = tl.minimum(left, SPAN)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = span * SPAN + offset
    inside = offset < count
    block = tl.load(tables_ptr + seq * max_blocks + token // BLOCK_TOKENS, mask=inside, other=0).to(
        tl.int64
    )
    source = (block * BLOCK_TOKENS + token % BLOCK_TOKENS) * (KV_LORA + ROPE)
    target = (tl.load(ends_ptr + piece) - count).to(tl.int64) + offset
    dtype = latent_ptr.dtype.element_ty
    i = tl.arange(0, LATENT_TILE)
    mask = inside[:, None] & (i[None, :] < KV_LORA)
    latent = tl.load(cache_ptr + source[:, None] + i[None, :], mask=mask, other=0.0)
    # The type is at least as wide as the cache's, so nothing is rounded.
    latent = widen(latent, dtype, INTERPRET)
    tl.store(latent_ptr + target[:, None] * KV_LORA + i[None, :], latent, mask=mask)
    d = tl.arange(0, ROPE_TILE)
    mask = inside[:, None] & (d[None, :] < ROPE)
    key = tl.load(cache_ptr + source[:, None] + KV_LORA + d[None, :], mask=mask, other=0.0)
    key = widen(key, dtype, INTERPRET)
    tl.store(key_ptr + target[:, None] * ROPE + d[None, :], key, mask=mask)


@triton.jit(
    do_not_specialize=[
        "lens_ptr",
        "pieces_ptr",
        "ends_ptr",
        "tile_pieces_ptr",
        "tile_rows_ptr",
        "span",
    ]
)
def _attend_expanded_kernel(
    q_ptr, expanded_ptr, key_ptr, starts_ptr, lens_ptr, first_keys_ptr, pieces_ptr, ends_ptr,
    tile_pieces_ptr, tile_rows_ptr, acc_ptr, lse_ptr, scale, span,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, V_TILE: tl.constexpr,
    ROWS_TILE: tl.constexpr, KV_TILE: tl.constexpr, SPAN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    piece = tl.load(tile_pieces_ptr + tile)
    seq = tl.load(pieces_ptr + piece)
    first_row = tl.load(tile_rows_ptr + tile)
    last_row = tl.load(starts_ptr + seq + 1)
    context = tl.load(lens_ptr + seq)
    first_key = tl.load(first_keys_ptr + seq)
    span_start = span * SPAN
    workspace = tl.load(ends_ptr + piece) - tl.minimum(context - span_start, SPAN)

    row = first_row + tl.arange(0, ROWS_TILE)
    valid = row < last_row
    position = context - (last_row - row)
    row64 = row.to(tl.int64)
    n = tl.arange(0, NOPE_TILE)
    d = tl.arange(0, ROPE_TILE)
    v = tl.arange(0, V_TILE)
    wide = tl.float32 if INTERPRET else q_ptr.dtype.element_ty  # of operands
    q_at = q_ptr + (row64[:, None] * HEADS + head) * (NOPE + ROPE)
    q_rope = tl.load(q_at + NOPE + d[None, :], mask=valid[:, None] & (d[None, :] < ROPE), other=0.0)
    q_rope = q_rope.to(wide)
    q_nope = q_rope  # not used where there is no NOPE
    if NOPE > 0:
        q_nope = tl.load(q_at + n[None, :], mask=valid[:, None] & (n[None, :] < NOPE), other=0.0)
        q_nope = q_nope.to(wide)

    best = tl.full((ROWS_TILE,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS_TILE,), dtype=tl.float32)
    acc = tl.zeros((ROWS_TILE, V_TILE), dtype=tl.float32)
    newest = context - last_row + tl.minimum(first_row + ROWS_TILE, last_row)  # one past it
    # Tiles that all rows see in whole, then those that they see in part.
    end = tl.minimum(span_start + SPAN, newest)
    first_tokens = context - last_row + first_row + 1  # that the first row sees
    turn = tl.minimum(tl.maximum(first_tokens // KV_TILE * KV_TILE, span_start), end)
    for partly in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        for start in range(turn if partly else span_start, end if partly else turn, KV_TILE):
            token = start + tl.arange(0, KV_TILE)
            # Before the first key there may be anything, such as somebody else's NaN, whose weight would be 0 * NaN.
            inside = (token < newest) & (token >= first_key)
            at = (workspace + token - span_start).to(tl.int64)
            expanded = expanded_ptr + (at * HEADS + head) * (NOPE + V)
            value = tl.load(
                expanded[:, None] + NOPE + v[None, :],
                mask=inside[:, None] & (v[None, :] < V), other=0.0,
            )  # fmt: skip
            value = value.to(wide)
            broken = token < 0  # of none
            if partly:
                value, broken = finite_values(value)
            key = tl.load(
                key_ptr + at[:, None] * ROPE + d[None, :],
                mask=inside[:, None] & (d[None, :] < ROPE), other=0.0,
            )  # fmt: skip
            scores = tl.dot(q_rope, tl.trans(key.to(wide)), input_precision="ieee")
            if NOPE > 0:
                k = tl.load(
                    expanded[:, None] + n[None, :],
                    mask=inside[:, None] & (n[None, :] < NOPE), other=0.0,
                )  # fmt: skip
                scores = tl.dot(q_nope, tl.trans(k.to(wide)), scores, input_precision="ieee")
            seen = (token[None, :] <= position[:, None]) & (token[None, :] >= first_key)
            scores = finite_or_nan(scores * scale)
            if partly:
                scores = tl.where(broken[None, :], float("nan"), scores)
            scores = tl.where(seen, scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            # A row that sees nothing yet keeps -inf as its best; exp(-inf - 0) is then 0, not NaN.
            pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
            p = tl.exp(scores - pivot[:, None])
            fade = tl.exp(best - pivot)
            total = total * fade + tl.sum(p, axis=1)
            acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
            best = new_best

    any_seen = total > 0.0
    result = acc / tl.where(any_seen, total, 1.0)[:, None]
    lse = tl.where(any_seen, best + tl.log(tl.where(any_seen, total, 1.0)), -float("inf"))

    # What the spans before gave, and this one. Where one of the two is empty the other stays as it is, to the bit.
    place = row64 * HEADS + head
    acc_at = acc_ptr + place[:, None] * V + v[None, :]
    mask = valid[:, None] & (v[None, :] < V)
    old_lse = tl.load(lse_ptr + place, mask=valid, other=-float("inf"))
    old = tl.load(acc_at, mask=mask, other=0.0)
    top = tl.maximum(old_lse, lse)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    old_weight = tl.exp(old_lse - pivot)
    weight = tl.exp(lse - pivot)
    both = old_weight + weight
    both = tl.where(both == 0.0, 1.0, both)
    tl.store(
        acc_at, (old * old_weight[:, None] + result * weight[:, None]) / both[:, None], mask=mask
    )
    tl.store(lse_ptr + place, top + tl.log(both), mask=valid)


def mla_prefill(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    first_keys: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention of every row over the keys that it sees; zeros where there are none."""
    rows, heads, q_dim = q.shape
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q_dim - rope_dim
    v_dim = kv_b.shape[1] - nope_dim
    seqs = len(plan.context_lens)
    assert rope_dim > 0 and nope_dim >= 0 and v_dim > 0 and kv_b.shape[0] == heads
    assert q.is_contiguous() and cache.is_contiguous() and block_tables.is_contiguous()
    assert kv_b.is_contiguous() and block_tables.shape[0] == seqs == first_keys.numel()
    starts, lens = plan.table[: seqs + 1], plan.table[seqs + 1 : 2 * seqs + 1]
    acc = q.new_zeros(rows, heads, v_dim, dtype=torch.float32)
    lse = q.new_full((rows, heads), -torch.inf, dtype=torch.float32)

    def tile(width: int) -> int:
        return max(16, triton.next_power_of_2(width))

    for launch in plan.launches:
        pieces, ends = plan.table[launch.pieces], plan.table[launch.ends]
        tile_pieces, tile_rows = plan.table[launch.tile_pieces], plan.table[launch.tile_rows]
        latents = q.new_empty(launch.tokens, kv_lora)
        keys = q.new_empty(launch.tokens, rope_dim)
        _gather_kernel[(len(pieces), triton.cdiv(SPAN, GATHER_TILE))](
            cache, block_tables, lens, pieces, ends, latents, keys, launch.span, block_tables.shape[1],
            KV_LORA=kv_lora, ROPE=rope_dim, BLOCK_TOKENS=cache.shape[1], LATENT_TILE=tile(kv_lora),
            ROPE_TILE=tile(rope_dim), SPAN=SPAN, TILE=GATHER_TILE, INTERPRET=INTERPRET,
        )  # fmt: skip
        expanded = linear(latents, kv_b.flatten(0, 1))  # [tokens, heads * (nope_dim + v_dim)]
        _attend_expanded_kernel[(len(tile_rows), heads)](
            q, expanded, keys, starts, lens, first_keys, pieces, ends, tile_pieces, tile_rows,
            acc, lse, scale, launch.span,
            HEADS=heads, NOPE=nope_dim, ROPE=rope_dim, V=v_dim, NOPE_TILE=tile(nope_dim), ROPE_TILE=tile(rope_dim),
            V_TILE=tile(v_dim), ROWS_TILE=ROWS_TILE, KV_TILE=KV_TILE, SPAN=SPAN, INTERPRET=INTERPRET,
            **LAUNCH,
        )  # fmt: skip
    return acc.to(q.dtype)


def mla_prefill_ref(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    first_keys: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> torch.Tensor:
    """The same in torch, one sequence after the other."""
    kv_lora = kv_b.shape[2]
    rope_dim = cache.shape[2] - kv_lora
    nope_dim = q.shape[2] - rope_dim
    out = q.new_empty(len(q), q.shape[1], kv_b.shape[1] - nope_dim)
    for seq, context in enumerate(plan.context_lens):
        start, end = plan.seq_starts[seq : seq + 2]
        blocks = block_tables[seq, : -(-context // cache.shape[1])].long()
        entries = cache[blocks].flatten(0, 1)[:context].float()
        entries[: first_keys[seq]] = 0  # there may be anything, such as somebody else's NaN
        expanded = torch.einsum("tl,hnl->htn", entries[:, :kv_lora], kv_b.float())
        keys, values = expanded.split((nope_dim, out.shape[2]), dim=-1)  # [heads, context, ...]
        shared = entries[:, kv_lora:].expand(len(keys), -1, -1)
        keys = torch.cat((keys, shared), dim=-1)
        scores = torch.einsum("rhd,htd->hrt", q[start:end].float(), keys) * scale
        position = torch.arange(context - (end - start), context, device=q.device)[:, None]
        token = torch.arange(context, device=q.device)
        hidden = (token > position) | (token < first_keys[seq])
        values, broken = finite_values_ref(values)
        scores = finite_or_nan_ref(scores).masked_fill(broken[:, None], torch.nan)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hrt,htv->rhv", weights, values).to(out.dtype)
    return out


def mla_prefill_bytes(
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
    """Bytes that must move when keys and values go through memory once: cache, them both ways, q, kv_b, out."""
    per_key = cache_bytes * (kv_lora + rope_dim) + 2 * element_bytes * heads * (nope_dim + v_dim)
    ends = element_bytes * rows * heads * (nope_dim + rope_dim + v_dim)
    return per_key * context_sum + ends + element_bytes * heads * (nope_dim + v_dim) * kv_lora


def mla_prefill_flops(
    context_sum: int,
    pairs: int,
    heads: int,
    *,
    kv_lora: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
) -> int:
    """Multiplications and additions; `pairs` is the number of keys that all rows see together."""
    expand = 2 * heads * context_sum * kv_lora * (nope_dim + v_dim)
    return expand + 2 * heads * pairs * (nope_dim + rope_dim + v_dim)

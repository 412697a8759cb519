"""Attention over the paged cache, of both kinds, and the merge of its spans."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional

from bench.kernels.case import Bench, Case, Work
from bench.kernels.shapes import GroupedQueries, Latent, Shape, Sizes
from headrace_kernels.attention import paged_attention as paged
from headrace_kernels.attention.merge_spans import merge_spans, merge_spans_bytes, merge_spans_ref
from headrace_kernels.attention.mla_attention import (
    attention_plan,
    mla_attention,
    mla_attention_bytes,
    mla_attention_flops,
    mla_attention_ref,
)
from headrace_kernels.attention.mla_prefill import (
    mla_prefill,
    mla_prefill_bytes,
    mla_prefill_flops,
    mla_prefill_ref,
    prefill_plan,
)

E4M3 = torch.float8_e4m3fn


def cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.shapes:
        a = shape.attention
        if isinstance(a, Latent):
            for dtype in (torch.bfloat16, E4M3):
                for seqs in (1, sizes.decode_rows):
                    yield _absorbed(shape, a, seqs, sizes, dtype)
                yield _expanded(shape, a, sizes, dtype)
            yield _merge(shape, a.heads, a.kv_lora, sizes)
        else:
            for seqs in (1, sizes.decode_rows):
                yield _grouped(shape, a, seqs, 1, sizes.context, sizes)
            yield _grouped(shape, a, 1, sizes.prompt, sizes.prompt, sizes)
            yield _merge(shape, a.heads, a.dim, sizes)


def _tables(bench: Bench, seqs: int, context: int, sizes: Sizes) -> torch.Tensor:
    blocks = -(-context // sizes.block_tokens)
    return bench.shuffled(seqs * blocks).view(seqs, blocks)


def _together(cache: torch.Tensor, tables: torch.Tensor, context: int) -> torch.Tensor:
    """The tokens of each sequence one after the other, `[seqs, context, ...]`."""
    # Bytes, as not every torch indexes e4m3.
    whole = cache.view(torch.uint8)[tables.long()].flatten(1, 2)
    return whole[:, :context].contiguous().view(cache.dtype)


def _merge(shape: Shape, heads: int, dim: int, sizes: Sizes) -> Case:
    rows = sizes.decode_rows
    spans = 2 if sizes.dry else -(-sizes.context // paged.SPAN)

    def build(bench: Bench) -> Work:
        part = bench.draw(spans * rows, heads, dim, dtype=torch.float32)
        lse = bench.draw(spans * rows, heads, dtype=torch.float32)
        # A row's spans are as many rows apart as there are.
        steps = [list(range(rows)), [rows] * rows, [spans] * rows]
        where = bench.integers(steps)
        out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=bench.device)
        return Work(
            ours=lambda: merge_spans(part, lse, where, out),
            theirs=lambda: merge_spans_ref(part, lse, where, out),
            theirs_is="the reference, one row after the other",
            check=lambda: (
                merge_spans(part, lse, where, torch.empty_like(out)),
                merge_spans_ref(part, lse, where, torch.empty_like(out)),
            ),
            nbytes=merge_spans_bytes(spans * rows, rows, heads, dim, 2),
        )

    point = f"{rows} rows of {spans} spans, {heads} heads, {dim}"
    return Case(wrapper="merge_spans", model=shape.model, point=point, build=build)


def _grouped(
    shape: Shape, a: GroupedQueries, seqs: int, rows: int, context: int, sizes: Sizes
) -> Case:
    """Decode where each sequence has one row, otherwise a whole prompt."""
    scale = a.dim**-0.5

    def build(bench: Bench) -> Work:
        tables = _tables(bench, seqs, context, sizes)
        blocks = tables.numel()
        caches = [bench.draw(blocks, sizes.block_tokens, a.kv_heads, a.dim) for _ in range(2)]
        q = bench.draw(seqs * rows, a.heads, a.dim)
        starts = list(range(0, seqs * rows + 1, rows))
        where = (tables, bench.integers(starts), bench.integers([context] * seqs))
        plan = paged.attention_plan(
            starts, [context] * seqs, heads=a.heads, dim=a.dim, device=bench.device
        )

        def ours() -> torch.Tensor:
            return paged.paged_attention(q, caches[0], caches[1], *where, scale=scale, plan=plan)

        k, v = (_together(cache, tables, context).transpose(1, 2) for cache in caches)
        queries = q.unflatten(0, (seqs, rows)).transpose(1, 2)

        def theirs() -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                queries, k, v, is_causal=rows > 1, scale=scale, enable_gqa=True
            )

        pairs = seqs * (context if rows == 1 else context * (context + 1) // 2)
        return Work(
            ours=ours,
            theirs=theirs,
            theirs_is="SDPA, KV in one piece",
            check=lambda: (
                ours(),
                paged.paged_attention_ref(q, caches[0], caches[1], *where, scale=scale),
            ),
            nbytes=paged.paged_attention_bytes(
                seqs * rows, seqs * context, a.heads, a.kv_heads, a.dim, 2
            ),
            flops=4
            * pairs
            * a.heads
            * a.dim,  # as the kernel's documentation says; it has no `flops()`
        )

    kind = (
        f"prefill of {rows} tokens" if rows > 1 else f"decode, {seqs} sequences, context {context}"
    )
    return Case(wrapper="paged_attention", model=shape.model, point=kind, build=build)


def _absorbed(shape: Shape, a: Latent, seqs: int, sizes: Sizes, dtype: torch.dtype) -> Case:
    context, scale = sizes.context, (a.nope + a.rope) ** -0.5

    def build(bench: Bench) -> Work:
        tables = _tables(bench, seqs, context, sizes)
        cache = bench.draw(tables.numel(), sizes.block_tokens, a.kv_lora + a.rope, dtype=dtype)
        q = bench.draw(seqs, a.heads, a.nope + a.rope)
        kv_b = bench.draw(a.heads, a.nope + a.v, a.kv_lora, scale=a.kv_lora**-0.5)
        where = (
            tables,
            bench.range(seqs),
            bench.integers([context - 1] * seqs),
            bench.integers([0] * seqs),
        )

        plan = attention_plan(
            np.full(seqs, context - 1, np.int32),
            heads=a.heads,
            kv_lora=a.kv_lora,
            device=bench.device,
        )

        def ours() -> torch.Tensor:
            return mla_attention(q, kv_b, cache, *where, scale=scale, plan=plan)

        keys = _together(cache, tables, context).to(q.dtype)
        w_k, w_v = kv_b.split((a.nope, a.v), dim=1)

        def theirs() -> torch.Tensor:
            latent = torch.einsum("rhn,hnl->rhl", q[..., : a.nope], w_k)
            query = torch.cat((latent, q[..., a.nope :]), dim=-1)
            weights = (torch.bmm(query, keys.transpose(1, 2)) * scale).softmax(-1)
            summed = torch.bmm(weights, keys[..., : a.kv_lora])
            return torch.einsum("rhl,hvl->rhv", summed, w_v)

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            wide = cache.float() if dtype == E4M3 else cache
            return ours(), mla_attention_ref(q, kv_b, wide, *where, scale=scale, plan=plan)

        costs = a.costs
        return Work(
            ours=ours,
            theirs=theirs,
            theirs_is="bmm, softmax, bmm, cache in one piece, in bf16",
            check=check,
            nbytes=mla_attention_bytes(
                seqs * context,
                seqs,
                a.heads,
                element_bytes=2,
                cache_bytes=dtype.itemsize,
                **costs,
            ),
            flops=mla_attention_flops(seqs * context, seqs, a.heads, **costs),
        )

    cache_is = "e4m3" if dtype == E4M3 else "bf16"
    plural = "sequence" if seqs == 1 else "sequences"
    point = f"decode, {seqs} {plural}, context {context}, {cache_is} cache"
    return Case(
        wrapper="mla_attention",
        model=shape.model,
        point=point,
        build=build,
        published=None if sizes.dry else f"mla {point}",
    )


def _expanded(shape: Shape, a: Latent, sizes: Sizes, dtype: torch.dtype) -> Case:
    tokens, scale = sizes.prompt, (a.nope + a.rope) ** -0.5

    def build(bench: Bench) -> Work:
        tables = _tables(bench, 1, tokens, sizes)
        cache = bench.draw(tables.numel(), sizes.block_tokens, a.kv_lora + a.rope, dtype=dtype)
        q = bench.draw(tokens, a.heads, a.nope + a.rope)
        kv_b = bench.draw(a.heads, a.nope + a.v, a.kv_lora, scale=a.kv_lora**-0.5)
        first = bench.integers([0])
        plan = prefill_plan([0, tokens], [tokens], bench.device)

        def ours() -> torch.Tensor:
            return mla_prefill(q, kv_b, cache, tables, first, plan, scale=scale)

        entries = _together(cache, tables, tokens)[0].to(q.dtype)
        queries = q.transpose(0, 1).unsqueeze(0)

        def theirs() -> torch.Tensor:
            expanded = functional.linear(entries[:, : a.kv_lora], kv_b.flatten(0, 1))
            keys, values = expanded.unflatten(1, (a.heads, -1)).split((a.nope, a.v), dim=-1)
            shared = entries[:, None, a.kv_lora :].expand(-1, a.heads, -1)
            keys = torch.cat((keys, shared), dim=-1).transpose(0, 1).unsqueeze(0)
            return functional.scaled_dot_product_attention(
                queries, keys, values.transpose(0, 1).unsqueeze(0), is_causal=True, scale=scale
            )

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            wide = cache.float() if dtype == E4M3 else cache
            return ours(), mla_prefill_ref(q, kv_b, wide, tables, first, plan, scale=scale)

        costs = a.costs
        return Work(
            ours=ours,
            theirs=theirs,
            theirs_is="matmul, then SDPA",
            check=check,
            nbytes=mla_prefill_bytes(
                tokens, tokens, a.heads, element_bytes=2, cache_bytes=dtype.itemsize, **costs
            ),
            flops=mla_prefill_flops(tokens, tokens * (tokens + 1) // 2, a.heads, **costs),
        )

    cache_is = "e4m3" if dtype == E4M3 else "bf16"
    return Case(
        wrapper="mla_prefill",
        model=shape.model,
        point=f"{tokens} tokens, {cache_is} cache",
        build=build,
        published=f"mla prefill, {tokens} tokens, bf16 cache"
        if dtype != E4M3 and not sizes.dry
        else None,
    )

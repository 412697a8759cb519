"""Norms, activations, rotary positions and masks: kernels that memory bandwidth bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from bench.kernels.case import Bench, Case, Work
from bench.kernels.shapes import GroupedQueries, Latent, Shape, Sizes
from headrace_kernels.attention.mla_store import mla_store, mla_store_bytes, mla_store_ref
from headrace_kernels.attention.rope import (
    rope_and_store_kv,
    rope_and_store_kv_bytes,
    rope_and_store_kv_ref,
)
from headrace_kernels.dense.mask_rows import mask_rows, mask_rows_bytes, mask_rows_ref
from headrace_kernels.dense.rms_norm import rms_norm, rms_norm_bytes, rms_norm_ref
from headrace_kernels.dense.silu_mul import silu_mul, silu_mul_bytes, silu_mul_ref

EPS = 1e-6
REFERENCE = "the reference, in torch operations"


def cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.shapes:
        for rows in (sizes.decode_rows, sizes.prefill_rows):
            yield _norm(shape, rows)
            if shape.ffn is not None:
                yield _silu(shape, rows, shape.ffn, "MLP")
            if shape.mixture is not None:
                pairs = rows * shape.mixture.top_k
                yield _silu(shape, pairs, shape.mixture.width, "experts")
            if isinstance(shape.attention, GroupedQueries):
                yield _rope(shape, shape.attention, rows, sizes)
            else:
                for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                    yield _latent(shape, shape.attention, rows, sizes, dtype)
        yield _masks(shape, sizes.decode_rows)
    yield _norm(sizes.shapes[0], sizes.prefill_rows, residual=True)


def _norm(shape: Shape, rows: int, *, residual: bool = False) -> Case:
    def build(bench: Bench) -> Work:
        x, weight = bench.draw(rows, shape.hidden), bench.draw(shape.hidden)
        more = bench.draw(rows, shape.hidden) if residual else None

        def theirs() -> torch.Tensor:
            if more is not None:
                more.add_(x)
            return functional.rms_norm(x if more is None else more, x.shape[1:], weight, EPS)

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            before = [None if more is None else more.clone() for _ in range(2)]
            return rms_norm(x, weight, EPS, before[0]), rms_norm_ref(x, weight, EPS, before[1])

        return Work(
            ours=lambda: rms_norm(x, weight, EPS, more),
            theirs=theirs,
            theirs_is="rms_norm",
            check=check,
            nbytes=rms_norm_bytes(rows, shape.hidden, 2, residual=residual),
        )

    point = f"{shape.hidden}{', with the residual' if residual else ''}, {rows} rows"
    return Case(wrapper="rms_norm", model=shape.model, point=point, build=build)


def _silu(shape: Shape, rows: int, width: int, of: str) -> Case:
    def build(bench: Bench) -> Work:
        x = bench.draw(rows, 2 * width)

        def theirs() -> torch.Tensor:
            gate, up = x.chunk(2, dim=1)
            return functional.silu(gate).mul_(up)

        return Work(
            ours=lambda: silu_mul(x),
            theirs=theirs,
            theirs_is="silu, then mul",
            check=lambda: (silu_mul(x), silu_mul_ref(x)),
            nbytes=silu_mul_bytes(rows, width, 2),
        )

    return Case(
        wrapper="silu_mul", model=shape.model, point=f"{of}, {width}, {rows} rows", build=build
    )


def _masks(shape: Shape, rows: int) -> Case:
    """Of answers that follow a grammar: most words of a mask forbid all of their tokens."""

    def build(bench: Bench) -> Work:
        logits = bench.draw(rows, shape.vocab, dtype=torch.float32)
        words = -(-shape.vocab // 32)
        masks = torch.where(bench.draw(rows, words) > 2, bench.range(words), 0).int()
        at = bench.range(rows, torch.int64)

        def result(function: Callable[..., None]) -> torch.Tensor:
            masked = logits.clone()
            function(masked, at, masks)
            return masked.nan_to_num(neginf=-9.0)

        return Work(
            ours=lambda: mask_rows(logits, at, masks),
            theirs=lambda: mask_rows_ref(logits, at, masks),
            theirs_is=REFERENCE,
            check=lambda: (result(mask_rows), result(mask_rows_ref)),
            nbytes=mask_rows_bytes(rows, shape.vocab, 4),
            limit=0.0,
        )

    point = f"{shape.vocab} tokens, {rows} rows"
    return Case(wrapper="mask_rows", model=shape.model, point=point, build=build)


def _places(bench: Bench, rows: int, sizes: Sizes) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Blocks of a cache for these rows, their positions, and slots in blocks that are not in order."""
    blocks = -(-rows // sizes.block_tokens)
    at = bench.range(rows, torch.int64)
    order = bench.shuffled(blocks).long()
    slots = order[at // sizes.block_tokens] * sizes.block_tokens + at % sizes.block_tokens
    return blocks, at.int(), slots


def _turns(bench: Bench, positions: int, width: int) -> torch.Tensor:
    angles = bench.draw(positions, width // 2, dtype=torch.float32)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rope(shape: Shape, a: GroupedQueries, rows: int, sizes: Sizes) -> Case:
    def build(bench: Bench) -> Work:
        blocks, positions, slots = _places(bench, rows, sizes)
        turns = _turns(bench, rows, a.dim)
        qkv = bench.draw(rows, a.heads + 2 * a.kv_heads, a.dim)
        cache = torch.zeros(
            2, blocks, sizes.block_tokens, a.kv_heads, a.dim, dtype=qkv.dtype, device=bench.device
        )

        def run(function: Callable[..., None], x: torch.Tensor, kv: torch.Tensor) -> None:
            q, k, v = x.split((a.heads, a.kv_heads, a.kv_heads), dim=1)
            function(q, k, v, turns, positions, slots, kv[0], kv[1])

        def result(function: Callable[..., None]) -> torch.Tensor:
            x, kv = qkv.clone(), torch.zeros_like(cache)
            run(function, x, kv)
            return torch.cat((x[:, : a.heads].flatten(), kv.flatten()))

        return Work(
            ours=lambda: run(rope_and_store_kv, qkv, cache),
            theirs=lambda: run(rope_and_store_kv_ref, qkv, cache),
            theirs_is=REFERENCE,
            check=lambda: (result(rope_and_store_kv), result(rope_and_store_kv_ref)),
            nbytes=rope_and_store_kv_bytes(rows, a.heads, a.kv_heads, a.dim, 2),
        )

    point = f"{a.heads} heads, {a.kv_heads} KV heads, {a.dim}, {rows} rows"
    return Case(wrapper="rope_and_store_kv", model=shape.model, point=point, build=build)


def _latent(shape: Shape, a: Latent, rows: int, sizes: Sizes, dtype: torch.dtype) -> Case:
    def build(bench: Bench) -> Work:
        blocks, positions, slots = _places(bench, rows, sizes)
        turns = _turns(bench, rows, a.rope)
        q = bench.draw(rows, a.heads, a.nope + a.rope)
        latent, norm = bench.draw(rows, a.kv_lora + a.rope), bench.draw(a.kv_lora)
        shape_of_cache = (blocks, sizes.block_tokens, a.kv_lora + a.rope)

        def empty(of: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape_of_cache, device=bench.device).to(of)

        cache = empty(dtype)

        def run(function: Callable[..., torch.Tensor], x: torch.Tensor, kv: torch.Tensor) -> None:
            function(x, latent, norm, EPS, turns, positions, slots, kv, rope_interleave=True)

        def result(function: Callable[..., torch.Tensor], of: torch.dtype) -> torch.Tensor:
            x, kv = q.clone(), empty(of)
            run(function, x, kv)
            return torch.cat((x.float().flatten(), kv.to(dtype).float().flatten()))

        return Work(
            ours=lambda: run(mla_store, q, cache),
            theirs=lambda: run(mla_store_ref, q, cache),
            theirs_is=REFERENCE,
            # Not every torch writes rows of e4m3, so the reference's are rounded behind it.
            check=lambda: (result(mla_store, dtype), result(mla_store_ref, torch.float32)),
            nbytes=mla_store_bytes(rows, a.heads, a.kv_lora, a.rope, 2, dtype.itemsize),
            limit=3e-2,  # a value between two of e4m3 may go either way
        )

    cache_is = "e4m3" if dtype == torch.float8_e4m3fn else "bf16"
    point = f"{a.heads} heads, {cache_is} cache, {rows} rows"
    return Case(wrapper="mla_store", model=shape.model, point=point, build=build)

"""A mixture of experts: what chooses, sorts, multiplies and sums, and the whole layer on one rank of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from bench.kernels.case import Bench, Case, Work
from bench.kernels.dense import an_fp8_matrix
from bench.kernels.one_rank import OneRankOf
from bench.kernels.shapes import Mixture, Shape, Sizes
from headrace_kernels.moe.combine import combine, combine_bytes, combine_ref
from headrace_kernels.moe.dispatch import Dispatch, SingleRank
from headrace_kernels.moe.experts import Experts, moe, moe_ref
from headrace_kernels.moe.fp8_grouped_linear import (
    Fp8Experts,
    fp8_experts,
    fp8_grouped_linear,
    fp8_grouped_linear_bytes,
    fp8_grouped_linear_flops,
    fp8_grouped_linear_ref,
)
from headrace_kernels.moe.grouped_linear import (
    grouped_linear,
    grouped_linear_bytes,
    grouped_linear_flops,
    grouped_linear_ref,
)
from headrace_kernels.moe.permute import permute, permute_bytes, permute_ref
from headrace_kernels.moe.route import route, route_bytes, route_ref
from headrace_kernels.ops import Routing

REFERENCE = "the reference, in torch operations"


def cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.shapes:
        if shape.mixture is None:
            continue
        for rows in (sizes.decode_rows, sizes.prefill_rows):
            yield _route(shape, shape.mixture, rows)
            yield _permute(shape, shape.mixture, rows)
            for gather in (True, False):
                yield _product(shape, shape.mixture, rows, gather=gather)
            yield _combine(shape, shape.mixture, rows)
            if shape.fp8:
                yield _layer(shape, shape.mixture, rows, sizes)
        if shape.fp8:
            yield _layer(shape, shape.mixture, sizes.decode_rows, sizes, ranks=sizes.ranks)


def _routing(m: Mixture) -> Routing:
    return Routing(
        experts=m.experts,
        top_k=m.top_k,
        groups=m.groups,
        top_groups=m.top_groups,
        normalise=True,
        scale=m.scale,
    )


def _chosen(bench: Bench, m: Mixture, rows: int) -> torch.Tensor:
    """Experts of rows as a router of random logits chooses them, `[rows, top_k]`."""
    logits = bench.draw(rows, m.experts, dtype=torch.float32)
    return route_ref(logits, torch.zeros_like(logits[0]), _routing(m))[0]


def _route(shape: Shape, m: Mixture, rows: int) -> Case:
    routing = _routing(m)

    def build(bench: Bench) -> Work:
        logits = bench.draw(rows, m.experts, dtype=torch.float32)
        bias = bench.draw(m.experts, dtype=torch.float32, scale=0.1)

        def spread(chosen: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            ids, weights = chosen
            return torch.zeros_like(logits).scatter_(1, ids.long(), weights)

        return Work(
            ours=lambda: route(logits, bias, routing),
            theirs=lambda: route_ref(logits, bias, routing),
            theirs_is=REFERENCE,
            check=lambda: (
                spread(route(logits, bias, routing)),
                spread(route_ref(logits, bias, routing)),
            ),
            nbytes=route_bytes(rows, m.experts, m.top_k),
            limit=3e-2,  # two experts that score alike to the last bits may change places
        )

    groups = "" if m.groups == 1 else f", {m.top_groups} of {m.groups} groups"
    point = f"{m.top_k} of {m.experts} experts{groups}, {rows} rows"
    return Case(wrapper="route", model=shape.model, point=point, build=build)


def _permute(shape: Shape, m: Mixture, rows: int) -> Case:
    def build(bench: Bench) -> Work:
        ids = _chosen(bench, m, rows).contiguous()
        return Work(
            ours=lambda: permute(ids, m.experts),
            theirs=lambda: permute_ref(ids, m.experts),
            theirs_is=REFERENCE,
            check=lambda: (
                torch.cat([part.flatten() for part in permute(ids, m.experts)]),
                torch.cat([part.flatten() for part in permute_ref(ids, m.experts)]),
            ),
            nbytes=permute_bytes(rows, m.top_k, m.experts),
            limit=0.0,
        )

    point = f"{rows} rows, {m.top_k} of {m.experts} experts"
    return Case(wrapper="permute", model=shape.model, point=point, build=build)


def _stack(
    bench: Bench, experts: int, n_out: int, n_in: int, *, fp8: bool
) -> Fp8Experts | torch.Tensor:
    if fp8:
        return fp8_experts([an_fp8_matrix(bench, n_out, n_in) for _ in range(experts)])
    whole = torch.empty(experts, n_out, n_in, dtype=torch.bfloat16, device=bench.device)
    for expert in range(experts):
        whole[expert] = bench.draw(n_out, n_in, scale=n_in**-0.5)
    return whole


def _product(shape: Shape, m: Mixture, rows: int, *, gather: bool) -> Case:
    """Gate and up of gathered rows, or down of rows that are in the order of their experts."""
    pairs = rows * m.top_k
    n_in, n_out = (shape.hidden, 2 * m.width) if gather else (m.width, shape.hidden)

    def build(bench: Bench) -> Work:
        ids = _chosen(bench, m, rows).contiguous()
        busy = len(ids.unique())
        permutation = permute_ref(ids, m.experts)
        weight = _stack(bench, m.experts, n_out, n_in, fp8=shape.fp8)
        x = bench.draw(rows if gather else pairs, n_in)
        ends = permutation.offsets[1:]
        row = permutation.pairs.long() // m.top_k
        ours: Callable[..., torch.Tensor]
        reference: Callable[..., torch.Tensor]
        if isinstance(weight, Fp8Experts):
            ours, reference = fp8_grouped_linear, fp8_grouped_linear_ref
            nbytes = fp8_grouped_linear_bytes(pairs, busy, n_in, n_out, 2)
            flops = fp8_grouped_linear_flops(pairs, n_in, n_out)
        else:
            ours, reference = grouped_linear, grouped_linear_ref
            nbytes = grouped_linear_bytes(pairs, busy, n_in, n_out, 2)
            flops = grouped_linear_flops(pairs, n_in, n_out)

        @functools.cache
        def wide() -> torch.Tensor:
            """The weights in bf16, `[experts, in, out]`: of e4m3 twice the bytes, so made when asked for."""
            if isinstance(weight, torch.Tensor):
                return weight.transpose(1, 2)
            whole = torch.empty(weight.weight.shape, dtype=x.dtype, device=bench.device)
            for expert in range(m.experts):
                whole[expert] = weight[expert].dequantised()
            return whole.transpose(1, 2)

        return Work(
            ours=lambda: ours(x, weight, permutation, gather=gather),
            theirs=lambda: functional.grouped_mm(x[row] if gather else x, wide(), offs=ends),
            theirs_is="grouped_mm, bf16" + (", of twice the weight bytes" if shape.fp8 else ""),
            check=lambda: (
                ours(x, weight, permutation, gather=gather),
                reference(x, weight, permutation, gather=gather),
            ),
            nbytes=nbytes,
            flops=flops,
        )

    name = "gate_up" if gather else "down"
    return Case(
        wrapper="fp8_grouped_linear" if shape.fp8 else "grouped_linear",
        model=shape.model,
        point=f"{name} {n_in} to {n_out}, {pairs} pairs, {m.experts} experts",
        build=build,
        peak="fp8" if shape.fp8 else "bf16",
    )


def _combine(shape: Shape, m: Mixture, rows: int) -> Case:
    def build(bench: Bench) -> Work:
        permutation = permute_ref(_chosen(bench, m, rows), m.experts)
        y = bench.draw(rows * m.top_k, shape.hidden)
        weights = bench.draw(rows, m.top_k, dtype=torch.float32)
        residual = bench.draw(rows, shape.hidden)
        args = (y, permutation.places.contiguous(), weights, residual)
        return Work(
            ours=lambda: combine(*args),
            theirs=lambda: combine_ref(*args),
            theirs_is=REFERENCE,
            check=lambda: (combine(*args), combine_ref(*args)),
            nbytes=combine_bytes(rows, m.top_k, shape.hidden, 2),
        )

    point = f"{m.top_k} of {shape.hidden}, {rows} rows"
    return Case(wrapper="combine", model=shape.model, point=point, build=build)


def _layer(shape: Shape, m: Mixture, rows: int, sizes: Sizes, *, ranks: int = 1) -> Case:
    """Router, experts and sum. Its bytes and flops are those of the two products, which are nearly all."""
    here = m.experts // ranks
    dispatch: Dispatch = SingleRank() if ranks == 1 else OneRankOf(here, m.top_k)

    def build(bench: Bench) -> Work:
        x, residual = bench.draw(rows, shape.hidden), bench.draw(rows, shape.hidden)
        gate_up = _stack(bench, here, 2 * m.width, shape.hidden, fp8=True)
        down = _stack(bench, here, shape.hidden, m.width, fp8=True)
        experts = Experts(
            gate=bench.draw(m.experts, shape.hidden, dtype=torch.float32, scale=shape.hidden**-0.5),
            bias=torch.zeros(m.experts, device=bench.device),
            counts=torch.zeros(m.experts, dtype=torch.int64, device=bench.device),
            gate_up=gate_up,
            down=down,
            routing=_routing(m),
            dispatch=dispatch,
        )
        ids, _ = route_ref(x.float() @ experts.gate.T, experts.bias, experts.routing)
        busy = len((ids % here).unique())
        pairs = rows * m.top_k
        sides = ((shape.hidden, 2 * m.width), (m.width, shape.hidden))
        return Work(
            ours=lambda: moe(x, experts, residual),
            theirs=lambda: moe_ref(x, experts, residual),
            theirs_is="the reference, one expert after the other",
            check=lambda: (moe(x, experts, residual), moe_ref(x, experts, residual)),
            nbytes=sum(fp8_grouped_linear_bytes(pairs, busy, i, o, 2) for i, o in sides),
            flops=sum(fp8_grouped_linear_flops(pairs, i, o) for i, o in sides),
            limit=3e-2,  # two experts that score alike to the last bits may change places
        )

    if ranks == 1:
        point = f"{m.experts} experts, {rows} tokens"
    else:
        point = f"one rank of {ranks}, {rows} tokens a rank"
    return Case(
        wrapper="moe",
        model=shape.model,
        point=point,
        build=build,
        peak="fp8",
        published=None if sizes.dry else f"moe, {point}",
    )

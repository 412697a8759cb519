"""Products with weights that all rows share, and what quantises rows for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from bench.kernels.case import Bench, Case, Work
from bench.kernels.shapes import GroupedQueries, Latent, Shape, Sizes
from headrace_kernels.attention.head_linear import (
    head_linear,
    head_linear_bytes,
    head_linear_flops,
    head_linear_ref,
)
from headrace_kernels.dense.fp8_linear import (
    Fp8Matrix,
    fp8_linear,
    fp8_linear_bytes,
    fp8_linear_flops,
    fp8_linear_ref,
    fp8_matrix,
)
from headrace_kernels.dense.fp8_quantise import (
    BLOCK,
    quantise_rows,
    quantise_rows_bytes,
    quantise_rows_ref,
)
from headrace_kernels.dense.linear import linear, linear_bytes, linear_flops, linear_ref


def cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.shapes:
        for name, n_in, n_out in _projections(shape):
            of_weights = _fp8 if shape.fp8 else _bf16
            for rows in (sizes.decode_rows, sizes.prefill_rows):
                yield of_weights(shape, name, rows, n_in, n_out)
        # Of a prompt, one row wants logits.
        yield _bf16(shape, "head", sizes.decode_rows, shape.hidden, shape.vocab)
        for rows in (sizes.decode_rows, sizes.prefill_rows):
            if shape.mixture is not None:
                yield _router(shape, rows)
            if shape.fp8:
                yield _quantise(shape, rows)
        if isinstance(shape.attention, Latent):
            yield from _absorbing(shape, shape.attention, sizes.decode_rows)


def _projections(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of a layer's matrices, stacked as the loader stacks them."""
    a, hidden = shape.attention, shape.hidden
    if isinstance(a, GroupedQueries):
        yield "qkv", hidden, (a.heads + 2 * a.kv_heads) * a.dim
        yield "out", a.heads * a.dim, hidden
    else:
        yield "qkv_a", hidden, a.q_lora + a.kv_lora + a.rope
        yield "q_b", a.q_lora, a.heads * (a.nope + a.rope)
        yield "out", a.heads * a.v, hidden
    if shape.ffn is not None:
        yield "gate_up", hidden, 2 * shape.ffn
        yield "down", shape.ffn, hidden


def _bf16(shape: Shape, name: str, rows: int, n_in: int, n_out: int) -> Case:
    def build(bench: Bench) -> Work:
        x = bench.draw(rows, n_in)
        weight = bench.draw(n_out, n_in, scale=n_in**-0.5)
        return Work(
            ours=lambda: linear(x, weight),
            theirs=lambda: functional.linear(x, weight),
            theirs_is="cuBLAS, bf16",
            check=lambda: (linear(x, weight), linear_ref(x, weight)),
            nbytes=linear_bytes(rows, n_in, n_out, 2),
            flops=linear_flops(rows, n_in, n_out),
        )

    point = f"{name} {n_in} to {n_out}, {rows} rows"
    return Case(wrapper="linear", model=shape.model, point=point, build=build)


def _router(shape: Shape, rows: int) -> Case:
    assert shape.mixture is not None
    experts, n_in = shape.mixture.experts, shape.hidden

    def build(bench: Bench) -> Work:
        x = bench.draw(rows, n_in, dtype=torch.float32)
        weight = bench.draw(experts, n_in, dtype=torch.float32, scale=n_in**-0.5)
        return Work(
            ours=lambda: linear(x, weight),
            theirs=lambda: functional.linear(x, weight),
            theirs_is="cuBLAS, fp32",
            check=lambda: (linear(x, weight), linear_ref(x, weight)),
            nbytes=linear_bytes(rows, n_in, experts, 4),
            flops=linear_flops(rows, n_in, experts),
            limit=1e-4,
        )

    point = f"router, fp32, {n_in} to {experts}, {rows} rows"
    return Case(wrapper="linear", model=shape.model, point=point, build=build, peak="fp32")


def an_fp8_matrix(bench: Bench, n_out: int, n_in: int) -> Fp8Matrix:
    scale = torch.full((-(-n_out // BLOCK), -(-n_in // BLOCK)), n_in**-0.5, device=bench.device)
    return fp8_matrix([(bench.draw(n_out, n_in, dtype=torch.float8_e4m3fn), scale)])


def _fp8(shape: Shape, name: str, rows: int, n_in: int, n_out: int) -> Case:
    def build(bench: Bench) -> Work:
        x = bench.draw(rows, n_in)
        weight = an_fp8_matrix(bench, n_out, n_in)
        wide = weight.dequantised().to(x.dtype)
        return Work(
            ours=lambda: fp8_linear(x, weight),
            theirs=lambda: functional.linear(x, wide),
            theirs_is="cuBLAS, bf16, of twice the weight bytes",
            check=lambda: (fp8_linear(x, weight), fp8_linear_ref(x, weight)),
            nbytes=fp8_linear_bytes(rows, n_in, n_out, 2),
            flops=fp8_linear_flops(rows, n_in, n_out),
        )

    point = f"{name} {n_in} to {n_out}, {rows} rows"
    return Case(wrapper="fp8_linear", model=shape.model, point=point, build=build, peak="fp8")


def _quantise(shape: Shape, rows: int) -> Case:
    width = shape.hidden

    def worth(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return values.float() * scale.repeat_interleave(BLOCK, dim=1)[:, :width]

    def build(bench: Bench) -> Work:
        x = bench.draw(rows, width)
        return Work(
            ours=lambda: quantise_rows(x),
            theirs=lambda: quantise_rows_ref(x),
            theirs_is="the reference, in torch operations",
            check=lambda: (worth(*quantise_rows(x)), worth(*quantise_rows_ref(x))),
            nbytes=quantise_rows_bytes(rows, width, 2),
        )

    return Case(
        wrapper="quantise_rows", model=shape.model, point=f"{width}, {rows} rows", build=build
    )


def _absorbing(shape: Shape, a: Latent, rows: int) -> Iterator[Case]:
    """The projections that absorbed attention has in each head: of queries, and of the sums."""

    def case(name: str, n_in: int, n_out: int, *, transposed: bool) -> Case:
        def build(bench: Bench) -> Work:
            x = bench.draw(rows, a.heads, n_in)
            stored = (n_out, n_in) if transposed else (n_in, n_out)
            weight = bench.draw(a.heads, *stored, scale=n_in**-0.5)
            weight = weight.transpose(1, 2) if transposed else weight
            by_head = x.transpose(0, 1).contiguous()
            return Work(
                ours=lambda: head_linear(x, weight),
                theirs=lambda: torch.bmm(by_head, weight),
                theirs_is="bmm, heads first",
                check=lambda: (head_linear(x, weight), head_linear_ref(x, weight)),
                nbytes=head_linear_bytes(rows, a.heads, n_in, n_out, 2),
                flops=head_linear_flops(rows, a.heads, n_in, n_out),
            )

        point = f"{name}, {a.heads} heads, {n_in} to {n_out}, {rows} rows"
        return Case(wrapper="head_linear", model=shape.model, point=point, build=build)

    yield case("queries", a.nope, a.kv_lora, transposed=False)
    yield case("values", a.kv_lora, a.v, transposed=True)

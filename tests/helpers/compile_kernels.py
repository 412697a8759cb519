"""Compile every Triton kernel for compute capability 9.0, at DeepSeek-R1's sizes, on a machine without a GPU.

A script of its own process, as Triton must not interpret there. It calls the wrappers with tensors on the CPU and stops
each launch after its compilation. Prints the bytes of shared memory of each kernel, kernels that nothing called, and
those that steps of other sizes compiled anew: in a server that is a pause of seconds.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any, cast

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import headrace_kernels
from headrace_kernels.fp8_grouped_linear import fp8_experts
from headrace_kernels.fp8_linear import Fp8Matrix, fp8_linear, fp8_matrix
from headrace_kernels.mla_attention import mla_attention
from headrace_kernels.mla_prefill import mla_prefill, prefill_plan
from headrace_kernels.mla_store import mla_store
from headrace_kernels.moe import Experts, SingleRank, moe
from headrace_kernels.ops import Routing
from headrace_kernels.paged_attention import paged_attention, row_tiles
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.rope import rope_and_store_kv


class NoDriver:
    """What compiling asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


SHARED: dict[str, int] = {}  # bytes of each kernel, the most of its variants
VARIANTS: dict[str, set[str]] = {}  # of each kernel


def compile_only() -> None:
    """Make a launch end with the compilation."""
    driver.set_active(cast("Any", NoDriver()))
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        SHARED[name] = max(SHARED.get(name, 0), kernel.metadata.shared)
        VARIANTS.setdefault(name, set()).add(kernel.hash)
        return kernel

    JITFunction.run = compiled


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def latent_attention(cache_dtype: torch.dtype, rows: int, context: int) -> None:
    heads, nope, rope, kv_lora, v = 128, 128, 64, 512, 128
    q, kv_b = empty(rows, heads, nope + rope), empty(heads, nope + v, kv_lora)
    cache = empty(8, 64, kv_lora + rope, dtype=cache_dtype)
    positions = torch.arange(rows, dtype=torch.int32)
    table = torch.zeros(1, -(-context // 64), dtype=torch.int32)
    turns = empty(64, rope, dtype=torch.float32)
    latent, norm = empty(rows, kv_lora + rope), empty(kv_lora)
    slots = positions.long()
    mla_store(q, latent, norm, 1e-6, turns, positions, slots, cache, rope_interleave=True)
    zero = table[0, :1]
    mla_attention(
        q, kv_b, cache, table, positions * 0, positions, zero, scale=0.1, max_context=context
    )
    plan = prefill_plan([0, rows], [context], torch.device("cpu"))
    mla_prefill(q, kv_b, cache, table, zero, plan, scale=0.1)


def e4m3(n_out: int, n_in: int) -> Fp8Matrix:
    scale = torch.ones(-(-n_out // 128), -(-n_in // 128))
    return fp8_matrix([(empty(n_out, n_in, dtype=torch.float8_e4m3fn), scale)])


def mixture_of_experts(rows: int, *, fp8: bool) -> None:
    hidden, width, here = 7168, 2048, 2  # of 256 experts, as with 128 ranks
    gate_up, down = empty(here, 2 * width, hidden), empty(here, hidden, width)
    experts = Experts(
        gate=empty(256, hidden, dtype=torch.float32),
        bias=empty(256, dtype=torch.float32),
        gate_up=fp8_experts([e4m3(2 * width, hidden)] * here) if fp8 else gate_up,
        down=fp8_experts([e4m3(hidden, width)] * here) if fp8 else down,
        routing=Routing(experts=256, top_k=8, groups=8, top_groups=4, normalise=True, scale=2.5),
        dispatch=SingleRank(),
    )
    moe(empty(rows, hidden), experts, empty(rows, hidden))


def of_llama(rows: int, context: int) -> None:
    heads, kv_heads, dim = 32, 8, 128
    qkv = empty(rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    k_cache, v_cache = empty(8, 64, kv_heads, dim), empty(8, 64, kv_heads, dim)
    positions = torch.arange(rows, dtype=torch.int32)
    turns = empty(64, dim, dtype=torch.float32)
    rope_and_store_kv(q, k, v, turns, positions, positions.long(), k_cache, v_cache)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    paged_attention(
        q.contiguous(),
        k_cache,
        v_cache,
        torch.zeros(1, -(-context // 64), dtype=torch.int32),
        starts,
        starts[1:],
        scale=0.1,
        max_context=context,
        tiles=row_tiles([0, rows]),
    )
    rms_norm(empty(rows, 7168), empty(7168), 1e-6)


def steps(rows: int, context: int) -> None:
    """One of each kind."""
    latent_attention(torch.bfloat16, rows, context)
    latent_attention(torch.float8_e4m3fn, rows, context)
    mixture_of_experts(rows, fp8=False)
    mixture_of_experts(rows, fp8=True)
    fp8_linear(empty(rows, 7168), e4m3(2112, 7168))
    of_llama(rows, context)


def all_kernels() -> set[str]:
    """Names of the kernels in the package; what they call is not named so."""
    modules = pkgutil.iter_modules(headrace_kernels.__path__)
    names: set[str] = set()
    for module in modules:
        members = vars(importlib.import_module(f"headrace_kernels.{module.name}"))
        names |= {name for name, member in members.items() if isinstance(member, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def main() -> None:
    compile_only()
    steps(5, 2000)
    first = {name: len(variants) for name, variants in VARIANTS.items()}
    for rows, context in (
        (1, 1),
        (16, 1024),
        (33, 5000),
    ):  # Triton looks at 1 and at multiples of 16
        steps(rows, context)
    again = sorted(name for name in first if len(VARIANTS[name]) > first[name])
    missing = sorted(all_kernels() - set(SHARED))
    print(json.dumps({"shared": SHARED, "missing": missing, "again": again}))


if __name__ == "__main__":
    main()

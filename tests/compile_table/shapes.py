"""Steps of known models: calls of the kernels' wrappers with tensors on the CPU. Nothing computes: launches.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headrace_kernels.attention import mla_attention as absorbed
from headrace_kernels.attention.mla_prefill import mla_prefill, prefill_plan
from headrace_kernels.attention.mla_store import mla_store
from headrace_kernels.attention.paged_attention import attention_plan, paged_attention
from headrace_kernels.attention.rope import rope_and_store_kv
from headrace_kernels.dense.fp8_linear import Fp8Matrix, fp8_linear, fp8_matrix
from headrace_kernels.dense.linear import linear
from headrace_kernels.dense.mask_rows import mask_rows
from headrace_kernels.dense.rms_norm import rms_norm
from headrace_kernels.dense.silu_mul import silu_mul
from headrace_kernels.moe.dispatch import Routed, SingleRank
from headrace_kernels.moe.experts import Experts, moe
from headrace_kernels.moe.fp8_grouped_linear import fp8_experts
from headrace_kernels.moe.placement import LayerPlacement
from headrace_kernels.one_sided.dispatch import OneSidedGroup
from headrace_kernels.one_sided.window import Window
from headrace_kernels.ops import Routing

BLOCK_TOKENS = 64

#: Rows and tokens of context of a step.
FIRST_STEP = (5, 2000)
#: Rows of a product that is not split into its parts, and whose tiles are the larger ones.
MANY = 2048
#: Triton looks whether a number is 1 and whether 16 divides it. None of these may need other kernels than the first.
OTHER_STEPS = ((1, 1), (16, 1024), (33, 5000))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A layer of a model with grouped-query attention. Its experts, if it has some, are left out."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16

    def step(self, rows: int, context: int) -> None:
        empty = partial(torch.empty, dtype=self.dtype)
        qkv = empty(rows, self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        k_cache = empty(8, BLOCK_TOKENS, self.kv_heads, self.dim)
        v_cache = torch.empty_like(k_cache)
        positions = torch.arange(rows, dtype=torch.int32)
        turns = torch.empty(64, self.dim)
        rope_and_store_kv(q, k, v, turns, positions, positions.long(), k_cache, v_cache)
        starts = torch.tensor([0, rows], dtype=torch.int32)
        paged_attention(
            q.contiguous(), k_cache, v_cache, torch.zeros(1, -(-context // BLOCK_TOKENS), dtype=torch.int32),
            starts, starts[1:], scale=0.1,
            plan=attention_plan([0, rows], [context], heads=self.heads, dim=self.dim, device=starts.device),
        )  # fmt: skip
        rms_norm(empty(rows, self.hidden), empty(self.hidden), 1e-6)
        for more in (0, MANY):
            linear(empty(rows + more, self.hidden), empty(qkv.shape[1] * self.dim, self.hidden))
        silu_mul(empty(rows, 2 * self.hidden))
        masks(rows, self.vocab)


def deepseek_r1(rows: int, context: int) -> None:
    """Both types of cache and of weights."""
    for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        latent_attention(cache_dtype, rows, context)
    for fp8 in (False, True):
        for more in (0, MANY):
            mixture_of_experts(rows + more, fp8=fp8)
        exchange(rows, e4m3=fp8)
    for more in (0, MANY):
        fp8_linear(empty(rows + more, 7168), e4m3(2112, 7168))
        linear(empty(rows + more, 7168), empty(129_280, 7168))
    for width in (7168, 1536):
        rms_norm(empty(rows, width), empty(width), 1e-6)
    masks(rows, 129_280)


def masks(rows: int, vocab: int) -> None:
    """All rows follow a grammar."""
    words = empty(rows, -(-vocab // 32), dtype=torch.int32)
    mask_rows(empty(rows, vocab, dtype=torch.float32), torch.arange(rows), words)


def latent_attention(cache_dtype: torch.dtype, rows: int, context: int) -> None:
    heads, nope, rope, kv_lora, v = 128, 128, 64, 512, 128
    q, kv_b = empty(rows, heads, nope + rope), empty(heads, nope + v, kv_lora)
    cache = empty(8, BLOCK_TOKENS, kv_lora + rope, dtype=cache_dtype)
    positions = torch.arange(rows, dtype=torch.int32)
    table = torch.zeros(1, -(-context // BLOCK_TOKENS), dtype=torch.int32)
    turns = empty(64, rope, dtype=torch.float32)
    latent, norm = empty(rows, kv_lora + rope), empty(kv_lora)
    slots = positions.long()
    mla_store(q, latent, norm, 1e-6, turns, positions, slots, cache, rope_interleave=True)
    zero = table[0, :1]
    at = np.arange(context - rows, context, dtype=np.int32)
    spans = absorbed.attention_plan(at, heads=heads, kv_lora=kv_lora, device=zero.device)
    absorbed.mla_attention(
        q, kv_b, cache, table, positions * 0, positions, zero, scale=0.1, plan=spans
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
        counts=empty(256, dtype=torch.int64),
        gate_up=fp8_experts([e4m3(2 * width, hidden)] * here) if fp8 else gate_up,
        down=fp8_experts([e4m3(hidden, width)] * here) if fp8 else down,
        routing=Routing(experts=256, top_k=8, groups=8, top_groups=4, normalise=True, scale=2.5),
        dispatch=SingleRank(),
    )
    moe(empty(rows, hidden), experts, empty(rows, hidden))


def exchange(rows: int, *, e4m3: bool) -> None:
    """Both ways between the ranks of a group, results one by one and summed."""
    for combine in ("exact", "partial"):
        window = Window(
            ranks=32, most_rows=64, hidden=7168, top_k=8, combine=combine, dtype=torch.bfloat16, e4m3=e4m3
        )  # fmt: skip
        group = OneSidedGroup(
            window, 1, empty(window.nbytes, dtype=torch.uint8), [0] * 32, whole=True
        )
        dispatch = group.dispatch(LayerPlacement.even(256, 32))
        ids = torch.arange(8, dtype=torch.int32).expand(rows, 8).contiguous()
        weights = empty(rows, 8, dtype=torch.float32)
        sent = dispatch.send(Routed(empty(rows, 7168), ids, weights))
        sent.which = torch.zeros(rows, dtype=torch.int32)
        answers = 8 if combine == "exact" else 1
        sent.give(empty(rows * answers, 7168), ids[:, :answers])
        sent.take()


MODELS: Mapping[str, Callable[[int, int], None]] = {
    "SmolLM2": Dense(
        hidden=576, heads=9, kv_heads=3, dim=64, vocab=49_152, dtype=torch.float32
    ).step,
    "DeepSeek-R1": deepseek_r1,
    "Llama-8B": Dense(hidden=4096, heads=32, kv_heads=8, dim=128, vocab=128_256).step,
    "Llama-70B": Dense(hidden=8192, heads=64, kv_heads=8, dim=128, vocab=128_256).step,
    "Qwen3-235B": Dense(hidden=4096, heads=64, kv_heads=4, dim=128, vocab=151_936).step,
    "gpt-oss": Dense(hidden=2880, heads=64, kv_heads=8, dim=64, vocab=201_088).step,
}

"""In the torch references of attention, too, a score that is infinite makes no plausible number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.attention.mla_attention import attention_plan, mla_attention_ref
from headrace_kernels.attention.mla_prefill import mla_prefill_ref, prefill_plan
from headrace_kernels.attention.paged_attention import paged_attention_ref

INFINITE = [float("inf"), -float("inf")]
BLOCK, CONTEXT, BROKEN = 4, 7, 3
TABLES = torch.tensor([[0, 1]], dtype=torch.int32)
NO_FIRST = torch.zeros(1, dtype=torch.int32)
SEEN = [False] * BROKEN + [True] * (CONTEXT - BROKEN)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def broken(rows: torch.Tensor) -> list[bool]:
    return (~rows.flatten(1).isfinite().all(1)).tolist()


@pytest.mark.parametrize("bad", INFINITE)
def test_of_keys_by_head(bad: float) -> None:
    keys, values = draw(2, BLOCK, 1, 8), draw(2, BLOCK, 1, 8, seed=1)
    keys[0, BROKEN, 0, 5] = bad
    out = paged_attention_ref(
        draw(CONTEXT, 1, 8, seed=2).abs(), keys, values, TABLES, torch.tensor([0, CONTEXT]),
        torch.tensor([CONTEXT]), scale=0.3,
    )  # fmt: skip
    assert broken(out) == SEEN


@pytest.mark.parametrize("bad", INFINITE)
def test_of_latents(bad: float) -> None:
    cache, kv_b = draw(2, BLOCK, 12), draw(1, 16, 8, seed=1)
    cache[0, BROKEN, 10] = bad  # of the rotated part, which is in keys only
    q = draw(CONTEXT, 1, 12, seed=2).abs()
    positions = torch.arange(CONTEXT, dtype=torch.int32)
    spans = attention_plan(positions.numpy(), heads=1, kv_lora=8, device=q.device)
    absorbed = mla_attention_ref(
        q, kv_b, cache, TABLES, torch.zeros_like(positions), positions, NO_FIRST, scale=0.3, plan=spans
    )  # fmt: skip
    plan = prefill_plan([0, CONTEXT], [CONTEXT], torch.device("cpu"))
    expanded = mla_prefill_ref(q, kv_b, cache, TABLES, NO_FIRST, plan, scale=0.3)
    assert broken(absorbed) == broken(expanded) == SEEN

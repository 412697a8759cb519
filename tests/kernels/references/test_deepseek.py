"""The torch references of DeepSeek's operations against `transformers`, module by module, and against plain loops.

Tolerances: float32 sums of some tens of terms in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace_kernels.attention.mla_attention import attention_plan, mla_attention_ref
from headrace_kernels.attention.mla_prefill import mla_prefill_ref, prefill_plan
from headrace_kernels.attention.mla_store import mla_store_ref
from headrace_kernels.dense.fp8_linear import fp8_linear_ref, fp8_matrix
from headrace_kernels.dense.fp8_quantise import BLOCK, quantise_rows_ref
from headrace_kernels.moe.dispatch import SingleRank
from headrace_kernels.moe.experts import Experts, moe_ref
from headrace_kernels.moe.fp8_grouped_linear import fp8_experts
from headrace_kernels.moe.permute import permute_ref
from headrace_kernels.moe.route import route_ref
from headrace_kernels.ops import Routing

if TYPE_CHECKING:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

CPU = torch.device("cpu")


def config(**changes: object) -> DeepseekV3Config:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    fields: dict[str, object] = {
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "vocab_size": 11,
        "num_hidden_layers": 1,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    return DeepseekV3Config(**{**fields, **changes})  # type: ignore[arg-type]


def randomised(module: torch.nn.Module, std: float) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module.requires_grad_(False)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (1, 1), (8, 8)])
def test_moe_is_that_of_transformers(groups: int, top_groups: int, normalise: bool) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    c = config(n_group=groups, topk_group=top_groups, norm_topk_prob=normalise)
    theirs = randomised(deepseek.DeepseekV3MoE(c), 0.2)
    bias = torch.randn(16) * 0.1 - 0.6  # so that biased scores are negative too
    theirs.gate.e_score_correction_bias.copy_(bias)  # type: ignore[operator]
    x = torch.randn(17, 32)
    ours = Experts(
        gate=theirs.gate.weight,  # type: ignore[arg-type]
        bias=bias,
        counts=torch.zeros(16, dtype=torch.int64),
        gate_up=theirs.experts.gate_up_proj,  # type: ignore[arg-type]
        down=theirs.experts.down_proj,  # type: ignore[arg-type]
        routing=Routing(
            experts=16,
            top_k=4,
            groups=groups,
            top_groups=top_groups,
            normalise=normalise,
            scale=c.routed_scaling_factor,
        ),
        dispatch=SingleRank(),
    )
    got = moe_ref(x, ours, theirs.shared_experts(x))  # type: ignore[operator]
    torch.testing.assert_close(got, theirs(x[None])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleave", [True, False])
def test_attention_is_that_of_transformers_either_way(interleave: bool) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    c = config(rope_interleave=interleave)
    theirs = randomised(deepseek.DeepseekV3Attention(c, 0), 0.3)
    rows, rope = 13, deepseek.DeepseekV3RotaryEmbedding(c)
    h, positions = torch.randn(rows, 32), torch.arange(rows)
    mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
    embeddings = rope(h[None], positions[None])
    want = theirs(h[None], position_embeddings=embeddings, attention_mask=mask)[0][0]

    angles = torch.outer(positions.float(), rope.inv_freq)  # type: ignore[arg-type]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    cache = torch.zeros(4, 4, 24 + 8)
    q = mla_store_ref(
        theirs.q_proj(h).view(rows, 4, 18),  # type: ignore[operator]
        theirs.kv_a_proj_with_mqa(h),  # type: ignore[operator]
        theirs.kv_a_layernorm.weight,  # type: ignore[arg-type]
        1e-6,
        cos_sin,
        positions.int(),
        positions,
        cache,
        rope_interleave=interleave,
    )
    kv_b = theirs.kv_b_proj.weight.view(4, 22, 24)  # type: ignore[operator]
    table, zeros = torch.arange(4, dtype=torch.int32)[None], torch.zeros(rows, dtype=torch.int32)
    scale: float = theirs.scaling  # type: ignore[assignment]
    spans = attention_plan(np.arange(rows, dtype=np.int32), heads=4, kv_lora=24, device=CPU)
    absorbed = mla_attention_ref(
        q, kv_b, cache, table, zeros, positions.int(), zeros[:1], scale=scale, plan=spans
    )
    plan = prefill_plan([0, rows], [rows], CPU)
    expanded = mla_prefill_ref(q, kv_b, cache, table, zeros[:1], plan, scale=scale)
    for got in (absorbed, expanded):
        projected = theirs.o_proj(got.flatten(1))  # type: ignore[operator]
        torch.testing.assert_close(projected, want, rtol=1e-5, atol=1e-5)


def test_equal_scores_go_to_the_lowest_experts() -> None:
    routing = Routing(experts=8, top_k=3, groups=4, top_groups=2, normalise=True, scale=2.0)
    ids, weights = route_ref(torch.zeros(2, 8), torch.zeros(8), routing)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 2 / 3))


def test_a_group_that_is_out_stays_out_when_all_biased_scores_are_negative() -> None:
    routing = Routing(experts=4, top_k=2, groups=2, top_groups=1, normalise=False, scale=1.0)
    # The second group has the best expert, but a worse sum.
    bias = torch.tensor([-3.0, -3.0, -1.0, -9.0])
    assert route_ref(torch.zeros(1, 4), bias, routing)[0].tolist() == [[0, 1]]


def test_pairs_come_in_the_order_of_experts_and_rows() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, -1]], dtype=torch.int32)
    offsets, pairs, places = permute_ref(ids, 4)
    assert offsets.tolist() == [0, 2, 2, 4, 4]  # experts 1 and 3 have nothing
    assert pairs[:4].tolist() == [1, 4, 0, 3]
    assert places.tolist() == [[2, 0], [-1, 3], [1, -1]]


def draw_fp8(n_out: int, n_in: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_out, n_in, generator=generator) * 100
    blocks = (-(-n_out // BLOCK), -(-n_in // BLOCK))
    scale = torch.rand(*blocks, generator=generator) * 1e-3 + 1e-4
    return weight.to(torch.float8_e4m3fn), scale


def test_stacked_fp8_matrices_keep_their_blocks() -> None:
    parts = [draw_fp8(130, 200, 0), draw_fp8(7, 200, 1), draw_fp8(256, 200, 2)]
    stacked = fp8_matrix(parts).dequantised()
    first = 0
    for weight, scale in parts:
        for row, column in ((0, 0), (len(weight) - 1, 199), (len(weight) // 2, 128)):
            want = weight[row, column].float() * scale[row // BLOCK, column // BLOCK]
            assert stacked[first + row, column] == want
        first += len(weight)


def test_quantised_rows_are_near_and_zeros_stay() -> None:
    x = torch.randn(5, 300) * torch.tensor([1e-6, 1.0, 1e6, 0.0, 3.0])[:, None]
    values, scale = quantise_rows_ref(x)
    assert values.shape == (5, 300) and scale.shape == (5, 3)
    back = values.float() * scale.repeat_interleave(BLOCK, dim=1)[:, :300]
    # e4m3 has 3 bits of fraction: half of a step is 1/16 of the value, or 2**-10 of the scale below 2**-6.
    error = (back - x).abs()
    assert (error <= x.abs() / 16 + scale.repeat_interleave(BLOCK, dim=1)[:, :300] * 2**-10).all()


def test_fp8_products_are_those_of_the_dequantised_weight() -> None:
    matrix = fp8_matrix([draw_fp8(130, 200, 0)])
    x = torch.randn(6, 200)
    exact = x @ matrix.dequantised().T
    got = fp8_linear_ref(x, matrix)
    assert (got - exact).norm() < 0.04 * exact.norm()  # a sixteenth at most for each activation
    assert torch.equal(fp8_experts([matrix, matrix])[1].dequantised(), matrix.dequantised())


def test_an_e4m3_cache_holds_the_rounded_entries_and_cuts_off_what_is_too_large() -> None:
    latent, norm = torch.randn(3, 16 + 4), torch.ones(16)
    norm[0] = 1e6
    cos_sin = torch.cat((torch.ones(1, 2), torch.zeros(1, 2)), dim=-1)  # no turn
    q, positions, slots = (
        torch.zeros(3, 1, 4),
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([5, 0, 3]),
    )
    wide = torch.zeros(2, 4, 20)
    narrow = torch.zeros(2, 4, 20, dtype=torch.float8_e4m3fn)
    for cache in (wide, narrow):
        mla_store_ref(q, latent, norm, 1e-6, cos_sin, positions, slots, cache, rope_interleave=True)
    assert torch.equal(narrow.float(), wide.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert (narrow.float()[1, 1, 0].abs() == 448) and not narrow.float()[0, 1].any()
    kv_b, table = torch.randn(2, 5, 16), torch.tensor([[1, 0]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    spans = attention_plan(np.ones(1, dtype=np.int32), heads=2, kv_lora=16, device=CPU)
    got = mla_attention_ref(
        torch.randn(1, 2, 4), kv_b, narrow, table, zero, zero + 1, zero, scale=1.0, plan=spans
    )
    assert got.isfinite().all()
